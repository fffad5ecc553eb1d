"""One Llama-like decoder block as a user would write it for a single device.

x + o(attention(norm(x))) followed by h + down(silu(gate(n)) * up(n)), with RMSNorm, rotary
positions, and attention spelled out (matmul, causal mask, softmax, matmul), so that every op is
visible to each peer. `BlockLoss` adds the benchmark's loss, the sum of the block's output.
Nothing here knows about ranks: the peers shard this module, or a copy of its weights.

B batch, S sequence, D model, H heads, K head dim, F feed-forward.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class BlockSize:
    """The shapes of one block benchmark; `feed_forward` is 4 x the model dim."""

    batch: int
    sequence: int
    model_dim: int
    num_heads: int

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def feed_forward(self) -> int:
        return 4 * self.model_dim

    @property
    def name(self) -> str:
        return f"D={self.model_dim} S={self.sequence}"


SMALL = BlockSize(batch=2, sequence=16, model_dim=64, num_heads=4)
LARGE = BlockSize(batch=2, sequence=128, model_dim=512, num_heads=8)


def rotary_tables(sequence: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each (S, K)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(sequence).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys."""
    half = x_BHSK.shape[-1] // 2
    swapped = torch.cat((-x_BHSK[..., half:], x_BHSK[..., :half]), dim=-1)
    return x_BHSK * cos_SK + swapped * sin_SK


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        mean_square = x_BSD.pow(2).mean(-1, keepdim=True)
        return self.weight * (x_BSD * torch.rsqrt(mean_square + self.eps))


class Attention(nn.Module):
    """Causal self-attention over `heads * head_dim` features, one matmul at a time."""

    def __init__(self, size: BlockSize, num_heads: int) -> None:
        super().__init__()
        width = num_heads * size.head_dim
        self.head_dim = size.head_dim
        self.q = nn.Linear(size.model_dim, width, bias=False)
        self.k = nn.Linear(size.model_dim, width, bias=False)
        self.v = nn.Linear(size.model_dim, width, bias=False)
        self.o = nn.Linear(width, size.model_dim, bias=False)
        cos_SK, sin_SK = rotary_tables(size.sequence, size.head_dim)
        mask_SS = torch.full((size.sequence, size.sequence), float("-inf")).triu(1)
        self.register_buffer("cos", cos_SK, persistent=False)
        self.register_buffer("sin", sin_SK, persistent=False)
        self.register_buffer("mask", mask_SS, persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, sequence, _ = x_BSD.shape
        heads = (batch, sequence, -1, self.head_dim)
        q_BHSK = self.q(x_BSD).view(heads).transpose(1, 2)
        k_BHSK = self.k(x_BSD).view(heads).transpose(1, 2)
        v_BHSK = self.v(x_BSD).view(heads).transpose(1, 2)
        q_BHSK = rotate(q_BHSK, self.cos, self.sin)
        k_BHSK = rotate(k_BHSK, self.cos, self.sin)
        scores_BHSS = torch.matmul(q_BHSK, k_BHSK.transpose(-1, -2)) * self.head_dim**-0.5
        weights_BHSS = torch.softmax(scores_BHSS + self.mask, dim=-1)
        mixed_BHSK = torch.matmul(weights_BHSS, v_BHSK)
        return self.o(mixed_BHSK.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    """SwiGLU over `width` hidden features."""

    def __init__(self, model_dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model_dim, width, bias=False)
        self.up = nn.Linear(model_dim, width, bias=False)
        self.down = nn.Linear(width, model_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    """One pre-norm decoder block, (B, S, D) to (B, S, D)."""

    def __init__(self, size: BlockSize) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.model_dim)
        self.attention = Attention(size, size.num_heads)
        self.feed_forward_norm = RMSNorm(size.model_dim)
        self.feed_forward = FeedForward(size.model_dim, size.feed_forward)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return h_BSD + self.feed_forward(self.feed_forward_norm(h_BSD))


class BlockLoss(nn.Module):
    """The block followed by the benchmark's loss, the sum of its output."""

    def __init__(self, size: BlockSize) -> None:
        super().__init__()
        self.block = Block(size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.block(x_BSD).sum()


def make_block(size: BlockSize, seed: int = 0) -> BlockLoss:
    """The same weights on every rank and in every row."""
    torch.manual_seed(seed)
    model = BlockLoss(size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model


def make_input(size: BlockSize, seed: int = 1) -> Tensor:
    """One (B, S, D) input that wants its gradient."""
    torch.manual_seed(seed)
    return torch.randn(size.batch, size.sequence, size.model_dim, requires_grad=True)
