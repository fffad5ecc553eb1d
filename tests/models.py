"""A small decoder in plain torch, without the casts to float32 that Hugging Face's norms make."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shard.block import Block, BlockSize

SIZE = BlockSize(batch=4, sequence=12, model_dim=16, num_heads=4)


class PlainDecoder(nn.Module):
    """Embedding, two Llama-like blocks, a head, and the mean cross-entropy of the next token."""

    def __init__(self, vocab: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, SIZE.model_dim)
        self.blocks = nn.ModuleList([Block(SIZE), Block(SIZE)])
        self.head = nn.Linear(SIZE.model_dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(logits, ids[:, 1:].flatten())}


def plain_decoder(dtype: torch.dtype = torch.float32) -> PlainDecoder:
    torch.manual_seed(0)
    return PlainDecoder().to(dtype)


def token_batches(count: int, vocab: int = 50, rows: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, vocab, (rows, SIZE.sequence), generator=generator) for _ in range(count)
    ]
