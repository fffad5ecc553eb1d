"""A local Hugging Face folder as a recipe: any causal language model that transformers knows.

Weights are loaded where the folder has them (safetensors only, nothing is unpickled), else made
from the seed. Nothing is fetched and no code from the folder is run. Common weight names are
declared cut along `tp`; what else a model calls its weights is left to the user's plan.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hyperparallel.errors import UserError
from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.recipes.recipe import Recipe, check_axes

if TYPE_CHECKING:
    from torch import nn

    from hyperparallel.train.config import TrainConfig


def folder_recipe(folder: Path) -> Recipe:
    """The recipe of a folder with a `config.json`."""
    path = folder / "config.json"
    try:
        vocab_size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError("model", str(folder), "a folder with a readable config.json") from error
    fields: dict[str, object] = {"model": str(folder)}
    if isinstance(vocab_size, int):
        fields["vocab_size"] = vocab_size
    if (folder / "tokenizer.json").exists():
        fields["tokenizer"] = folder
    return Recipe(
        folder.name, partial(folder_model, folder), partial(folder_plan, folder), fields, ("vocab_size",)
    )


def folder_model(folder: Path, config: TrainConfig) -> nn.Module:  # noqa: ARG001 -- as every recipe's
    """The model, with the folder's weights if it has any and memory is wanted for them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module
    if any(folder.glob("*.safetensors")) and torch.get_default_device().type != "meta":
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    else:
        described = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_config(described)
    return model


def folder_plan(folder: Path, mesh: Mesh) -> Plan:
    """Data parallelism, and tensor parallelism for model types whose weight names are known."""
    check_axes(mesh)
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    layouts = {}
    if "tp" in mesh.names and kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"):
        layouts = {n: mesh("tp", None) for n in ("*.q_proj.weight", "*.up_proj.weight")}
    return Plan(mesh, params=layouts, fsdp="fsdp" if "fsdp" in mesh.names else None)
