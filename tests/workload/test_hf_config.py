"""What a configuration lacks or gets wrong is named, with the key, the value and what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hyperparallel.errors import ModelError, UserError
from hyperparallel.workload.hf_config import model_from_config, read_model
from tests.workload.configs import CONFIGS, DIT

pytestmark = pytest.mark.pure


def broken(name: str, **keys: Any) -> dict[str, Any]:
    return {**CONFIGS[name], **keys}


def without(name: str, key: str) -> dict[str, Any]:
    return {given: value for given, value in CONFIGS[name].items() if given != key}


NEEDED = [
    ("llama", "hidden_size"),
    ("llama", "vocab_size"),
    ("llama", "num_hidden_layers"),
    ("llama", "intermediate_size"),
    ("mixtral", "num_local_experts"),
    ("qwen3_moe", "moe_intermediate_size"),
    ("qwen3_moe", "intermediate_size"),
    ("deepseek_v3", "kv_lora_rank"),
    ("deepseek_v3", "num_experts_per_tok"),
    ("gpt2", "n_positions"),
    ("mamba2", "state_size"),
    ("nemotron_h", "hybrid_override_pattern"),
    ("qwen2_vl", "vision_config"),
    ("vit", "num_attention_heads"),
]


@pytest.mark.parametrize(("name", "key"), NEEDED)
def test_a_missing_key_is_named(name: str, key: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{key}.*no such key"):
        model_from_config(without(name, key), name, "config.json")


WRONG = [
    (broken("llama", hidden_size=0), "hidden_size: got 0; allowed: a positive integer"),
    (broken("llama", hidden_size=True), "hidden_size: got True"),
    (broken("llama", hidden_size="48"), "hidden_size: got '48'"),
    (broken("llama", num_hidden_layers=2.5), "num_hidden_layers: got 2.5"),
    (
        broken("llama", num_attention_heads=7, num_key_value_heads=7),
        "heads: got 7; allowed: a divisor of the hidden size 48",
    ),
    (broken("llama", num_key_value_heads=4), "num_key_value_heads: got 4; allowed: a divisor of 6 heads"),
    (broken("llama", tie_word_embeddings="yes"), "tie_word_embeddings: got 'yes'; allowed: true or false"),
    (broken("llama", attention_dropout=2), "attention_dropout: got 2"),
    (broken("mixtral", num_experts_per_tok=5), "num_experts_per_tok: got 5; allowed: at most the 4 experts"),
    (broken("gemma2", layer_types=["full_attention"]), "a list of 3 words"),
    (broken("gemma2", layer_types=["full_atention"] * 3), "write full_attention instead"),
    (broken("nemotron_h", hybrid_override_pattern="MX"), "hybrid_override_pattern: got 'X'"),
    (broken("nemotron_h latent", layers_block_type=["mambo"]), "got 'mambo'"),
    (broken("qwen3_moe", mlp_only_layers="1"), "mlp_only_layers: got '1'"),
    ({"model_type": "lama"}, "model_type: got 'lama'.*write llama instead"),
    ({"model_type": "deepseek_v9"}, "write deepseek_v. instead"),
    ({"hidden_size": 4}, "model_type or _class_name"),
    ({**DIT, "patch_size": 0}, "patch_size: got 0"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_a_wrong_value_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_config(keys, "model", "config.json")


def test_a_misspelt_key_is_shown() -> None:
    keys = without("llama", "hidden_size") | {"hiden_size": 48}
    with pytest.raises(UserError, match="the nearest key there is hiden_size"):
        model_from_config(keys, "llama")


def test_an_encoder_that_does_not_fit_its_decoder_is_refused() -> None:
    vision = {**CONFIGS["qwen2_vl"]["vision_config"], "hidden_size": 40}
    with pytest.raises(ModelError, match="got 40; allowed: the hidden size 48"):
        model_from_config(broken("qwen2_vl", vision_config=vision), "vl")


@pytest.mark.parametrize(("text", "message"), [("{", "readable JSON"), ("[1]", "a JSON object")])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        read_model(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a folder that holds one"):
        read_model(tmp_path)


def test_layers_in_order() -> None:
    """Windows, dense layers and patterns stand where the file says."""
    gemma = model_from_config(CONFIGS["gemma3_text"], "gemma")
    assert [layer.attention.kind for layer in gemma.each_layer() if layer.attention] == (
        ["window"] * 5 + ["gqa"] + ["window"]
    )
    deepseek = model_from_config(CONFIGS["deepseek_v3"], "deepseek")
    assert [type(layer.mlp).__name__ for layer in deepseek.each_layer()] == ["Mlp", "Moe", "Moe"]
    hybrid = model_from_config(CONFIGS["nemotron_h"], "hybrid")
    kinds = [
        (layer.attention.kind if layer.attention else "", bool(layer.mlp)) for layer in hybrid.each_layer()
    ]
    assert kinds == [("ssm", False), ("", True), ("gqa", False), ("", True), ("ssm", False)]
    assert [count for _, count in hybrid.kinds] == [2, 1, 1, 1]


def test_a_saved_file_reads_like_its_keys(tmp_path: Path) -> None:
    for name, keys in CONFIGS.items():
        (tmp_path / "config.json").write_text(json.dumps(keys))
        assert read_model(tmp_path).layers == model_from_config(keys, name).layers
