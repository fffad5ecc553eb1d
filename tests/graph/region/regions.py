"""Models with regions written by hand, and the same models without."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperparallel as hp

HEADS = ("dp", None, "cp", None)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Scores, mask and softmax written out; [batch, heads, sequence, size]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        length = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ v


def ring_attention(q: Tensor, k: Tensor, v: Tensor, skip: bool = False) -> Tensor:
    """Causal attention over a sequence cut by cp: keys and values go round, the softmax is summed up.

    skip: leave out blocks of keys that lie wholly in the future, so that ranks compute different amounts.
    """
    here, count, length = hp.axis_index("cp"), hp.axis_size("cp"), q.shape[2]
    rows = here * length + torch.arange(length)
    largest = q.new_full((*q.shape[:3], 1), -1e30)
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for step in range(count):
        source = (here - step) % count
        if not (skip and source > here):
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            columns = source * length + torch.arange(length)
            scores = scores.masked_fill(columns[None, :] > rows[:, None], -1e30)
            now = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
            weights = torch.exp(scores - now)
            keep = torch.exp(largest - now)
            total, out = total * keep + weights.sum(-1, keepdim=True), out * keep + weights @ v
            largest = now
        if step + 1 < count:
            k, v = hp.ppermute(k, "cp", 1), hp.ppermute(v, "cp", 1)
    return out / total


class Attention(nn.Module):
    """Attention with a residual; `how` is the region, None the dense one."""

    def __init__(self, how: object = None, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attend = self.how if callable(self.how) else dense_attention
        y: Tensor = attend(parts[0], parts[1], parts[2])
        return x + self.out(y.transpose(1, 2).reshape(rows, length, width))


class Stack(nn.Module):
    """A deep stack of equal blocks with a region in each, and a loss."""

    def __init__(self, how: object = None, depth: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(how) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def mlp_code(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return hp.all_reduce(F.silu(x @ up.T) @ down.T, "tp")


def pending_mlp_code(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up.T) @ down.T


def from_first(x: Tensor) -> Tensor:
    """Rows less the first of all, which is on the first rank; others may have none."""
    return x - hp.broadcast(x[:1], ("dp", "tp"))


less_first = hp.local_region(from_first, [(("dp", "tp"), None)], (("dp", "tp"), None))


class FromFirst(nn.Module):
    """Linear layers around rows less the first row; `how` is the region, None the dense one."""

    def __init__(self, how: object = None) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(4, 6), nn.Linear(6, 3), how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.how(x) if callable(self.how) else x - x[:1]).pow(2).mean()


WEIGHTS = [("dp", None), ("tp", None), (None, "tp")]
reduced_mlp = hp.local_region(mlp_code, WEIGHTS, ("dp", None))
pending_mlp = hp.local_region(pending_mlp_code, WEIGHTS, ("dp", None, {"tp": "sum"}))


class Mlp(nn.Module):
    """An MLP whose middle is a region; None: plain."""

    def __init__(self, how: object = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if callable(self.how):
            y = self.how(x, self.up.weight, self.down.weight)
        else:
            y = self.down(F.silu(self.up(x)))
        return self.last(x + y).pow(2).mean()
