"""Recipes are found by name, by folder and by function; their plans fit their models."""

from __future__ import annotations

import json
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hyperparallel.cli.request import read_request
from hyperparallel.errors import UserError
from hyperparallel.layout import Mesh
from hyperparallel.recipes import Recipe, find_recipe, names
from hyperparallel.train.config import make_config

pytestmark = pytest.mark.fake
MESHES = [Mesh((4,), ("dp",)), Mesh((2, 2), ("dp", "tp")), Mesh((2, 2), ("fsdp", "tp"))]


def _weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return dict(recipe.model(make_config(recipe.fields)).named_parameters())


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_declared_layouts_match_the_model(name: str, mesh: Mesh) -> None:
    recipe = find_recipe(name)
    weights = _weights(recipe)
    plan = recipe.declare(mesh)
    for pattern, layout in plan.params.items():
        hits = [p for key, p in weights.items() if fnmatchcase(key, pattern)]
        assert hits and all(p.dim() == layout.ndim for p in hits)
    assert plan.fsdp == ("fsdp" if "fsdp" in mesh.names else None)


def test_the_demo_has_about_ten_million_parameters() -> None:
    count = sum(p.numel() for p in _weights(find_recipe("llama_demo")).values())
    assert 9e6 < count < 11e6


def test_a_folder_gives_its_weights(tmp_path: Path) -> None:
    small = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(1)
    saved = LlamaForCausalLM(small)
    saved.save_pretrained(tmp_path)
    recipe = find_recipe(str(tmp_path))
    config = make_config(recipe.fields)
    assert config.vocab_size == 300
    loaded = recipe.model(config).state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in saved.state_dict().items())
    assert set(recipe.declare(MESHES[1]).params) == {"*.q_proj.weight", "*.up_proj.weight"}
    assert all(p.is_meta for p in _weights(recipe).values())

    (tmp_path / "model.safetensors").unlink()
    torch.manual_seed(0)
    fresh = recipe.model(config).state_dict()
    assert not torch.equal(fresh["lm_head.weight"], loaded["lm_head.weight"])


def test_unknown_model_types_are_declared_data_parallel_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert find_recipe(str(tmp_path)).declare(MESHES[1]).params == {}


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_folder_without_a_config_is_refused(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        find_recipe(str(tmp_path))


def test_what_a_recipe_settles_or_does_not_know_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for words, field in ((["vocab_size=400"], "vocab_size=400"), (["model=other"], "model=other")):
        with pytest.raises(UserError, match=f"^override: got '{field}'; allowed: none: .* settles"):
            read_request(str(tmp_path), mesh=None, plan=None, overrides=words)
    for model in (str(tmp_path), "llama_demo"):
        with pytest.raises(UserError, match=r"^mesh axis: got 'tq'; allowed: .* or tp; write tp instead"):
            read_request(model, mesh="dp=2,tq=2", plan=None, overrides=[])
    assert {one.name for one in fields(Recipe)} == {"name", "model", "declare", "fields", "settled"}
