"""What code inside a region can ask and do: where it is, and collectives along mesh axes.

All are functional and differentiable (the gradient is the transpose; sums and averages only). An axis is
a name or a tuple of names, outermost first: the group is the ranks that differ from this one only along
them. Sizes may differ from rank to rank. On one rank (an axis of size one) a collective hands back its
operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperparallel.errors import UserError
from hyperparallel.graph.collective_table import REDUCE_OPS
from hyperparallel.graph.region.seat import Seat, seat

Axis = str | Sequence[str]


def axis_index(axis: Axis) -> int:
    """This rank's position along an axis, from 0: a plain number, good for arithmetic and slicing.

    Ranks may compute differently by it; they must call the same collectives.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> add_index = hp.local_region(lambda x: x + hp.axis_index("tp"), [mesh("tp")], mesh("tp"))
    >>> add_index(torch.zeros(4))
    tensor([0., 0., 1., 1.])
    """
    here = seat()
    return here.index(here.axes(axis))


def axis_size(axis: Axis) -> int:
    """The number of ranks along an axis.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> def average(x):
    ...     return hp.all_reduce(x, "tp") / hp.axis_size("tp")
    >>> mean = hp.local_region(average, [mesh("tp")], mesh(None))
    >>> mean(torch.tensor([1.0, 3.0]))
    tensor([2.])
    """
    here = seat()
    return len(here.members(here.axes(axis)))


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The reduction of all members' `x`, on every member; op: sum, avg, max, min or prod.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> fold = hp.local_region(lambda x: hp.all_reduce(x, "tp"), [mesh("tp")], mesh(None))
    >>> fold(torch.arange(4.0))
    tensor([2., 4.])
    """
    here, axes = _call("all_reduce", x, axis, op)
    if len(here.members(axes)) == 1:
        return x
    shapes = here.shapes(("all_reduce", axes, op), axes, x)
    _agree(here, "all_reduce", shapes, None)
    return here.run("all_reduce", x, axes, op)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """All members' `x`, joined along `dim` in the order of the axis; other dims must be equal.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> join = hp.local_region(lambda x: hp.all_gather(x, "tp"), [mesh("tp")], mesh(None))
    >>> join(torch.arange(4.0))
    tensor([0., 1., 2., 3.])
    """
    here, axes = _call("all_gather", x, axis)
    dim = _dim(here, "all_gather", x, dim)
    if len(here.members(axes)) == 1:
        return x
    shapes = here.shapes(("all_gather", axes, dim), axes, x)
    _agree(here, "all_gather", shapes, dim)
    sizes = [shape[dim] for shape in shapes]
    return here.run("all_gather", x, axes, dim, sizes)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, op: str = "sum") -> Tensor:
    """This member's piece along `dim` of the reduction of all members' `x`.

    Pieces are those of a layout: ceil(n / members) each, the last ones smaller or empty.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> add_copies = hp.local_region(lambda x: hp.reduce_scatter(x, "tp"), [mesh(None)], mesh("tp"))
    >>> add_copies(torch.arange(4.0))
    tensor([0., 2., 4., 6.])
    """
    here, axes = _call("reduce_scatter", x, axis, op)
    dim = _dim(here, "reduce_scatter", x, dim)
    if len(here.members(axes)) == 1:
        return x
    shapes = here.shapes(("reduce_scatter", axes, dim, op), axes, x)
    _agree(here, "reduce_scatter", shapes, None)
    sizes = piece_sizes(x.shape[dim], len(shapes))
    return here.run("reduce_scatter", x, axes, dim, sizes, op)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Piece i along `split_dim` goes to member i; those received are joined along `concat_dim`.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> turn = hp.local_region(
    ...     lambda x: hp.all_to_all(x, "tp", split_dim=1, concat_dim=0), [mesh("tp", None)], mesh(None, "tp")
    ... )
    >>> turn(torch.arange(4.0).view(2, 2))  # cut by rows before, by columns after
    tensor([[0., 1.],
            [2., 3.]])
    """
    here, axes = _call("all_to_all", x, axis)
    split_dim, concat_dim = (_dim(here, "all_to_all", x, d) for d in (split_dim, concat_dim))
    if len(here.members(axes)) == 1:
        return x
    # The call goes with the shapes: ranks that meet in different calls are told so.
    shapes = here.shapes(("all_to_all", axes, split_dim, concat_dim), axes, x)
    _agree(here, "all_to_all", shapes, concat_dim)
    count, index = len(shapes), here.index(axes)
    split = piece_sizes(x.shape[split_dim], count)
    concat = [shape[concat_dim] for shape in shapes]
    # What was cut is joined again: member i gets the i-th piece of everybody's own cut.
    if split_dim == concat_dim:
        concat = [piece_sizes(n, count)[index] for n in concat]
    return here.run("all_to_all", x, axes, split_dim, split, concat_dim, concat)


def ppermute(x: Tensor, axis: Axis, perm: int | Sequence[tuple[int, int]]) -> Tensor:
    """Send `x` along (from, to) pairs of positions on the axis; zeros where nothing arrives.

    perm: the pairs, each position at most once as sender and once as receiver; or a number of steps
    around the ring (1: everyone gets the `x` of the one before).

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> turn = hp.local_region(lambda x: hp.ppermute(x, "tp", 1), [mesh("tp")], mesh("tp"))
    >>> turn(torch.arange(4.0))
    tensor([2., 3., 0., 1.])
    """
    here, axes = _call("ppermute", x, axis)
    count = len(here.members(axes))
    sends = _sends(here, perm, count)
    if count == 1:
        return x if sends else torch.zeros_like(x)
    shapes = here.shapes(("ppermute", axes, tuple(sends)), axes, x)
    # Where nothing arrives, zeros of this rank's own shape.
    source = {target: a for a, target in sends}.get(here.index(axes), here.index(axes))
    return here.run("permute", x, axes, sends, list(shapes[source]))


def broadcast(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """The `x` of the member at position `root` of the axis, on every member; other members' may differ in
    shape, and their gradients are zero.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> second = hp.local_region(lambda x: hp.broadcast(x, "tp", root=1), [mesh("tp")], mesh(None))
    >>> second(torch.arange(4.0))
    tensor([2., 3.])
    """
    here, axes = _call("broadcast", x, axis)
    count = len(here.members(axes))
    if type(root) is not int or not 0 <= root < count:
        allowed = f"a position below {count}{_alone(count)}"
        raise UserError(f"root of broadcast in {here.region}", root, allowed)
    if count == 1:
        return x
    shapes = here.shapes(("broadcast", axes, root), axes, x)
    return here.run("broadcast", x, axes, root, list(shapes[root]))


def piece_sizes(size: int, count: int) -> list[int]:
    """How a layout cuts `size` elements in `count`.

    >>> piece_sizes(5, 4)
    [2, 2, 1, 0]
    """
    chunk = -(-size // count)
    return [max(0, min(chunk, size - i * chunk)) for i in range(count)]


def _sends(here: Seat, perm: Any, count: int) -> list[tuple[int, int]]:
    """The (from, to) pairs of a permutation; `UserError` for what is none."""
    if type(perm) is int:
        return [(i, (i + perm) % count) for i in range(count)]
    lists = (list, tuple)
    pairs = isinstance(perm, lists) and all(isinstance(p, lists) and len(p) == 2 for p in perm)
    for side in zip(*perm, strict=True) if pairs else [(None,)]:
        if len(set(side)) != len(side) or not all(type(i) is int and 0 <= i < count for i in side):
            allowed = f"a number of steps, or pairs of positions below {count}{_alone(count)}"
            once = "each once as sender and once as receiver"
            raise UserError(f"perm of ppermute in {here.region}", perm, f"{allowed}, {once}")
    return [(a, b) for a, b in perm]


def _alone(count: int) -> str:
    """Why there is but one position: a model that is not parallelized runs its regions on one device."""
    if count > 1:
        return ""
    return " (one device runs the region; give hp.local_region a reference= or mesh= for what it means there)"


def _call(name: str, x: Any, axis: Axis, op: str = "sum") -> tuple[Seat, tuple[str, ...]]:
    here = seat()
    if not isinstance(x, Tensor):
        raise UserError(f"{name} in {here.region}", type(x).__name__, "a tensor")
    if op not in REDUCE_OPS:
        raise UserError(f"op of {name} in {here.region}", op, "one of " + ", ".join(REDUCE_OPS))
    return here, here.axes(axis)


def _dim(here: Seat, name: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise UserError(f"dim of {name} in {here.region}", dim, f"a dim of a tensor of {x.dim()} dims")
    return dim % x.dim()


def _agree(here: Seat, name: str, shapes: Sequence[tuple[int, ...]], free: int | None) -> None:
    """All members' operands must be alike, but for the dim along which they are joined."""
    alike = {tuple(n for d, n in enumerate(shape) if d != free) for shape in shapes}
    if len(alike) > 1:
        but = "" if free is None else f" but for dim {free}"
        raise UserError(f"operand of {name} in {here.region}", shapes, f"equal shapes on all ranks{but}")
