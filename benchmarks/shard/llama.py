"""The Llama that parts B and C train and capture: transformers' own, small, with random weights."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

VOCABULARY = 4096
SEQUENCE = 256
BATCH = 4


@dataclasses.dataclass(frozen=True)
class LlamaSize:
    """Layers and width; the feed-forward is 2.75 times as wide."""

    num_layers: int
    hidden: int = 512

    @property
    def name(self) -> str:
        return f"{self.num_layers} layers, hidden {self.hidden}"


def make_llama(size: LlamaSize, seed: int = 0) -> nn.Module:
    """`LlamaForCausalLM` in float32: 8 heads over 4 KV heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def make_batch(seed: int = 1, batch: int = BATCH) -> dict[str, Tensor]:
    """Random tokens, labels equal to them (the model shifts)."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, VOCABULARY, (batch, SEQUENCE), generator=generator)
    return {"input_ids": tokens_BS, "labels": tokens_BS.clone()}
