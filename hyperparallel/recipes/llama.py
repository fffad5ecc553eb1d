"""Llama recipes: transformers' own `LlamaForCausalLM`, sharded from a few declared weights.

Cutting the rows of one attention and one MLP projection by heads and hidden units, and those of the
output head by vocabulary, fixes the usual tensor-parallel program; the rest is derived. Axes are
named `dp` (batch), `fsdp` (batch, parameters stored cut) and `tp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.recipes.recipe import Recipe, check_axes

if TYPE_CHECKING:
    from torch import nn

    from hyperparallel.train.config import TrainConfig

CUT_ROWS = ("*.q_proj.weight", "*.up_proj.weight", "lm_head.weight")


def llama_demo() -> Recipe:
    """About 10M parameters, trained in minutes on a laptop's CPU."""
    fields = {"model": "llama_demo", "steps": 100, "batch_size": 8, "seq_len": 128}
    return Recipe("llama_demo", build_demo, declare, fields)


def declare(mesh: Mesh) -> Plan:
    """The declared layouts on a mesh.

    >>> declare(Mesh((2, 2), ("fsdp", "tp"))).fsdp
    'fsdp'
    """
    check_axes(mesh)
    layouts = {name: mesh("tp", None) for name in CUT_ROWS} if "tp" in mesh.names else {}
    return Plan(mesh, params=layouts, fsdp="fsdp" if "fsdp" in mesh.names else None)


def build_demo(config: TrainConfig) -> nn.Module:
    """The demo's model; its vocabulary is the tokenizer's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=max(2048, config.seq_len),
        )
    )
    return model
