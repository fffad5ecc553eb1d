"""The hand-written peer: Megatron's tensor parallelism of the block, with functional collectives.

Every rank holds half of the heads and half of the feed-forward width. `Enter` (Megatron's f) is
the identity forward and an all-reduce backward; `Leave` (Megatron's g) is the reverse: two
collectives forward, two backward. The local modules are the single-device ones of `block.py`,
built narrower, so no op differs from the single-device program but the collectives.
Source: Shoeybi et al. 2019, arXiv 1909.08053, figure 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.shard.block import Attention, BlockLoss, BlockSize, FeedForward, RMSNorm

# The dim on which each weight is cut: output features first, then back along input features.
CUT_DIM = {
    "block.attention.q.weight": 0,
    "block.attention.k.weight": 0,
    "block.attention.v.weight": 0,
    "block.attention.o.weight": 1,
    "block.feed_forward.gate.weight": 0,
    "block.feed_forward.up.weight": 0,
    "block.feed_forward.down.weight": 1,
}


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The functional ops themselves: the Python wrapper's tensor subclass costs 100 us more."""
    ops = torch.ops._c10d_functional  # checked on torch 2.13
    summed: Tensor = ops.wait_tensor(ops.all_reduce(x, "sum", group_name))
    return summed


class Enter(torch.autograd.Function):
    """Into the sharded region: whole forward, summed backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group_name), None


class Leave(torch.autograd.Function):
    """Out of the sharded region: summed forward, whole backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:  # noqa: ARG004 -- as torch calls it
        return all_reduce(x, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 -- as torch calls it
        return grad, None


class MegatronBlock(nn.Module):
    """One rank's half of the block; without a group it is the local half alone."""

    def __init__(self, size: BlockSize, num_ranks: int, group_name: str | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.model_dim)
        self.attention = Attention(size, size.num_heads // num_ranks)
        self.feed_forward_norm = RMSNorm(size.model_dim)
        self.feed_forward = FeedForward(size.model_dim, size.feed_forward // num_ranks)
        self.group_name = group_name

    def enter(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.group_name is None else Enter.apply(x_BSD, self.group_name)

    def leave(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.group_name is None else Leave.apply(x_BSD, self.group_name)

    def forward(self, x_BSD: Tensor) -> Tensor:
        mixed_BSD = self.attention(self.enter(self.attention_norm(x_BSD)))
        h_BSD = x_BSD + self.leave(mixed_BSD)
        fed_BSD = self.feed_forward(self.enter(self.feed_forward_norm(h_BSD)))
        return h_BSD + self.leave(fed_BSD)


class MegatronBlockLoss(nn.Module):
    """The rank's half followed by the loss; its names are those of `BlockLoss`."""

    def __init__(self, size: BlockSize, num_ranks: int, group_name: str | None) -> None:
        super().__init__()
        self.block = MegatronBlock(size, num_ranks, group_name)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.block(x_BSD).sum()


def cut(name: str, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The rank's piece of a weight of the single-device block."""
    if name not in CUT_DIM:
        return whole.clone()
    return whole.chunk(num_ranks, CUT_DIM[name])[rank].contiguous()


def megatron_block(model: BlockLoss, size: BlockSize, *, communicate: bool) -> MegatronBlockLoss:
    """The rank's half of `model`, with or without its collectives."""
    group = dist.group.WORLD
    assert group is not None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    local = MegatronBlockLoss(size, num_ranks, group.group_name if communicate else None)
    pieces = {
        name: cut(name, parameter.detach(), rank, num_ranks)
        for name, parameter in model.named_parameters()
    }
    local.load_state_dict(pieces)
    return local


def whole_gradients(local: MegatronBlockLoss) -> dict[str, Tensor]:
    """Every parameter's gradient put together from all ranks (outside the measured time)."""
    grads = {}
    for name, parameter in local.named_parameters():
        grad = parameter.grad
        assert grad is not None
        if name in CUT_DIM:
            pieces = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, grad.contiguous())
            grad = torch.cat(pieces, CUT_DIM[name])
        grads[name] = grad
    return grads
