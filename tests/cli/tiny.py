"""A recipe small enough to train inside a test; found as `tests.cli.tiny:tiny`."""

from __future__ import annotations

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hyperparallel.recipes import Recipe
from hyperparallel.recipes.llama import declare
from hyperparallel.train.config import TrainConfig


def tiny() -> Recipe:
    fields = {"vocab_size": 300, "batch_size": 4, "seq_len": 16, "steps": 4}
    return Recipe("tiny", build, declare, fields)


def narrow() -> Recipe:
    """The same with a smaller vocabulary and batch."""
    return Recipe("narrow", build, declare, {"vocab_size": 290, "batch_size": 2, "seq_len": 16})


def failing() -> Recipe:
    """A recipe whose model cannot be built on any rank."""
    return Recipe("failing", fail, declare, {"vocab_size": 300})


def fail(config: TrainConfig) -> nn.Module:
    raise RuntimeError("this model is broken")


def not_a_recipe() -> int:
    return 3


def build(config: TrainConfig) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
