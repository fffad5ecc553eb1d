"""Parameter counts equal those of the libraries' own modules, family by family, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    ViTForImageClassification,
    ViTModel,
)
from transformers.modeling_layers import MtpModel

from hyperparallel.workload.hf_config import FAMILIES, model_from_config
from hyperparallel.workload.model import Model, Moe
from tests.workload.configs import CONFIGS

pytestmark = pytest.mark.fake

ALIKE = {"kimi_k2": "deepseek_v3"}
"""Families whose files keep another family's keys; the library knows the other name only."""
OUTSIDE = {"DiTTransformer2DModel", "Transformer2DModel"}
"""Families of another library, tested in test_dit.py."""


def built(keys: dict[str, Any]) -> PreTrainedModel:
    """The library's module for a configuration, without memory."""
    keys = dict(keys)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        if config.model_type == "vit":
            classifier = "ViTForImageClassification" in str(keys.get("architectures"))
            return ViTForImageClassification(config) if classifier else ViTModel(config)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        return auto.from_config(config)


def read(name: str) -> Model:
    return model_from_config(CONFIGS[name], name)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_parameters_are_counted(name: str) -> None:
    assert read(name).params() == sum(weight.numel() for weight in built(CONFIGS[name]).parameters())


def test_every_family_has_a_configuration() -> None:
    tested = {config["model_type"] for config in CONFIGS.values()}
    assert set(FAMILIES) - tested == set(ALIKE) | OUTSIDE


def test_a_saved_configuration_reads_the_same() -> None:
    """What the library writes to config.json (with its own defaults filled in) says the same."""
    for name, keys in CONFIGS.items():
        saved = built(keys).config.to_dict()
        assert model_from_config(saved, name).params() == read(name).params(), name


@pytest.mark.parametrize("name", [n for n in CONFIGS if "expert" in str(CONFIGS[n])])
def test_the_split_of_a_mixture_follows_the_names_of_the_weights(name: str) -> None:
    model, experts, router = read(name), 0, 0
    for path, weight in built(CONFIGS[name]).named_parameters():
        if ".experts." in path:
            experts += weight.numel()
        elif ".gate." in path or ".router." in path:
            router += weight.numel()
    split = [(model.layer_params(layer), count) for layer, count in model.kinds]
    assert sum(part.experts * count for part, count in split) == experts
    assert sum(part.router * count for part, count in split) == router
    share = next(layer.mlp.topk / layer.mlp.experts for layer, _ in model.kinds if isinstance(layer.mlp, Moe))
    assert model.active_params() == pytest.approx(model.params() - experts * (1 - share))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3_text", "deepseek_v3"])
def test_the_split_of_a_layer_follows_the_names_of_the_weights(name: str) -> None:
    model = read(name)
    attention = mlp = 0
    for path, weight in built(CONFIGS[name]).named_parameters():
        if ".self_attn." in path or ".attn." in path:
            attention += weight.numel()
        elif ".mlp." in path and ".experts." not in path and ".gate." not in path:
            mlp += weight.numel()
    split = [(model.layer_params(layer), count) for layer, count in model.kinds]
    assert sum(part.attention * count for part, count in split) == attention
    assert sum(part.mlp * count for part, count in split) == mlp


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_extra_predictions(name: str) -> None:
    keys = {**CONFIGS[name], "num_mtp_layers": 2}
    model, main = model_from_config(keys, name), built(keys)
    with torch.device("meta"):
        extra = MtpModel(main, 2)
    assert model.mtp_params == sum(weight.numel() for weight in extra.layers.parameters())
    seq, one = 16, model_from_config(CONFIGS[name], name).flops_per_token(16)
    last = model.layer_at(-1).flops_per_token(model.hidden, seq)
    projection = 2 * 2 * model.hidden * model.hidden
    assert model.flops_per_token(seq, mtp=True) == one + 2 * (last + projection + model.head_flops())
