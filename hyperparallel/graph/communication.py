"""The words for communication in a rank's program: call targets that say what moves, not how.

`runtime` binds them to process groups, `runtime.virtual` to the other ranks of one process, the
simulator to a clock. Each collective is a start, which returns a handle, and a `wait` on the handle,
which returns the tensor; `axes` is the tuple of mesh axes that the group spans. Sizes are elements along
a dim, one entry per member of the group in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

Axes = tuple[str, ...]


def _unbound(what: str) -> NoReturn:
    raise AssertionError(f"{what} stands in a program that was not bound to ranks")


def all_reduce_start(x: Any, op: str, axes: Axes) -> Any:
    """Every member gets the reduction of all members' `x`."""
    _unbound("all_reduce_start")


def all_gather_start(x: Any, dim: int, sizes: Sequence[int], axes: Axes) -> Any:
    """Every member gets the concatenation along `dim` of pieces of the given sizes."""
    _unbound("all_gather_start")


def reduce_scatter_start(x: Any, dim: int, sizes: Sequence[int], op: str, axes: Axes) -> Any:
    """Member i gets the i-th piece along `dim` of the reduction of all members' `x`."""
    _unbound("reduce_scatter_start")


def all_to_all_start(
    x: Any,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    axes: Axes,
) -> Any:
    """Member i gets the i-th piece along `split_dim` of every member, concatenated on `concat_dim`."""
    _unbound("all_to_all_start")


def permute_start(x: Any, sends: Sequence[tuple[int, int]], recv_shape: Sequence[int], axes: Axes) -> Any:
    """`x` goes along (from, to) pairs of members; zeros of `recv_shape` where nothing arrives."""
    _unbound("permute_start")


def all_gather_many_start(
    xs: Sequence[Any], dims: Sequence[int], sizes: Sequence[Sequence[int]], axes: Axes
) -> Any:
    """`all_gather_start` of every x with its dim and sizes, as one collective; `wait` gives all results."""
    _unbound("all_gather_many_start")


def reduce_scatter_many_start(
    xs: Sequence[Any], dims: Sequence[int], sizes: Sequence[Sequence[int]], op: str, axes: Axes
) -> Any:
    """`reduce_scatter_start` of every x with its dim and sizes, as one collective; `wait` gives all."""
    _unbound("reduce_scatter_many_start")


def wait(pending: Any) -> Any:
    """The tensor that a started collective makes, or all tensors of one that makes many."""
    _unbound("wait")


STARTS = (
    all_reduce_start,
    all_gather_start,
    reduce_scatter_start,
    all_to_all_start,
    all_gather_many_start,
    reduce_scatter_many_start,
    permute_start,
)
"""Every target that starts a collective; the group's axes are its last argument."""

SINGLE = {all_gather_many_start: all_gather_start, reduce_scatter_many_start: reduce_scatter_start}
"""For a collective of many tensors, that of one: it takes one item of each list, and the other arguments."""


NEUTRAL = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def pend(x: torch.Tensor, op: str, keep: bool) -> torch.Tensor:
    """A whole value as this member's share of a pending reduction: `x` on one member, neutral on others."""
    return x if keep else torch.full_like(x, NEUTRAL[op])


Box = tuple[tuple[int, int], ...]
"""Per dim, (start, length)."""


def pack(x: torch.Tensor, blocks: Sequence[Box]) -> torch.Tensor:
    """The elements of `x` in the given blocks, one after another, as one flat tensor."""
    return torch.cat([x.new_empty(0), *(_block(x, block).reshape(-1) for block in blocks)])


def unpack(flat: torch.Tensor, blocks: Sequence[Box], shape: Sequence[int]) -> torch.Tensor:
    """A tensor of `shape` whose blocks, which tile it, are filled from `flat` in order."""
    whole = flat.new_empty(tuple(shape))
    start = 0
    for block in blocks:
        target = _block(whole, block)
        target.copy_(flat[start : start + target.numel()].view(target.shape))
        start += target.numel()
    return whole


def _block(x: torch.Tensor, block: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(block):
        x = x.narrow(dim, start, length)
    return x
