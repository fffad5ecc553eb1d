"""Collectives on plain local tensors, each split in a start and a wait.

These functions stand as `call_function` targets in the program of one rank. They are functional:
the input is never written (unless it is given up: `over`) and the result is contiguous, whatever the
strides of the input. Sizes
may be uneven or zero. Bytes are moved by the group's transport: a torch process group (`process_group.py`)
or shared memory (`shm.py`). A group of one rank never communicates and hands its input back.

What a collective was given must not change before its wait is over: transports read it until then.
Several collectives of a group may be under way at once, waited for in any order; every member must
start them in the same order. `HYPERPARALLEL_DEBUG=collectives` checks that they do (`debug.py`).

Leaves out layouts: which collective a redistribution needs is decided in `layout/reshard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from hyperparallel.errors import UserError
from hyperparallel.graph.collective_table import REDUCE_OPS, check_reduction
from hyperparallel.runtime.comm.group import Group

Sends = Sequence[tuple[int, int]]
"""(sending member, receiving member) pairs, as indexes in the group; the same on every member."""


class InFlight(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Block until the result is there; a second call returns the same tensor."""


class InFlightMany(Protocol):
    """A collective of several tensors under way."""

    def wait(self) -> tuple[Tensor, ...]:
        """Block until all results are there."""


class Transport(Protocol):
    """Moves the bytes of one group. Arguments are checked, the group has more than one member."""

    def all_reduce(self, x: Tensor, op: str, over: bool = False) -> InFlight: ...

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> InFlight: ...

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> InFlight: ...

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
    ) -> InFlight: ...

    def permute(self, x: Tensor, sends: Sends, recv_shape: Sequence[int]) -> InFlight: ...

    def broadcast(self, x: Tensor, root: int, root_shape: Sequence[int]) -> InFlight: ...

    def all_gather_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> InFlightMany: ...

    def reduce_scatter_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], op: str
    ) -> InFlightMany: ...

    def all_reduce_many(self, xs: Sequence[Tensor], op: str, over: bool = False) -> InFlightMany: ...


class Ready:
    """A collective that needed no communication."""

    __slots__ = ("result",)

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class Several:
    """Collectives waited for together."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[InFlight]) -> None:
        self.parts = parts

    def wait(self) -> tuple[Tensor, ...]:
        return tuple([part.wait() for part in self.parts])


def wait(pending: InFlight) -> Tensor:
    """The result of a started collective, waited for. Raises `RunError` if a peer died.

    >>> import torch
    >>> wait(all_reduce_start(torch.ones(2), "sum", Group((0,), rank=0)))
    tensor([1., 1.])
    """
    return pending.wait()


def all_reduce_start(x: Tensor, op: str, group: Group, over: bool = False) -> InFlight:
    """Start reducing `x` over the group, elementwise; every member gets the result, of `x`'s shape.

    op: "sum", "max", "min", "prod" or "avg". Booleans take max (any) and min (all) only, integers
    all but avg. Raises `UserError` for those, `RunError` when this rank is no member. over: `x` is not read
    again, so the result may be written over it.
    """
    # The usual case in two looks: the full check would show in small collectives.
    if op not in REDUCE_OPS or not x.is_floating_point():
        check_reduction(op, x.dtype)
    if group.size == 1 and group.index == 0:
        return Ready(x)
    return transport_of(group, "all_reduce").all_reduce(x, op, over)


def all_gather_start(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> InFlight:
    """Start gathering the members' pieces along `dim`, in group order.

    sizes: elements along `dim` that each member holds, uneven or 0; the other dims are equal.
    Raises `UserError` if `sizes` does not fit `x`, `RunError` when this rank is no member.
    """
    # Before the check of sizes: index -1 of a rank outside the group would be taken for the last member.
    transport = None if group.size == 1 and group.index == 0 else transport_of(group, "all_gather")
    _check_gather(x, dim, sizes, group)
    return Ready(x) if transport is None else transport.all_gather(x, dim, sizes)


def reduce_scatter_start(x: Tensor, dim: int, sizes: Sequence[int], op: str, group: Group) -> InFlight:
    """Start reducing `x` over the group; member i keeps piece i of `dim`.

    sizes: elements along `dim` for each member, uneven or 0; they sum to `x.shape[dim]`. Ops,
    dtypes and errors are those of `all_reduce_start` and `all_gather_start`.
    """
    if op not in REDUCE_OPS or not x.is_floating_point():
        check_reduction(op, x.dtype)
    transport = None if group.size == 1 and group.index == 0 else transport_of(group, "reduce_scatter")
    _check_scatter(x, dim, sizes, group)
    return Ready(x) if transport is None else transport.reduce_scatter(x, dim, sizes, op)


def all_gather_many_start(
    xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], group: Group
) -> InFlightMany:
    """Start gathering every x along its dim, all in one message where messages are dear.

    xs: of one dtype, the same number on every member. Results, sizes and errors are those of
    `all_gather_start` for each.
    """
    for x, dim, parts in zip(xs, dims, sizes, strict=True):
        _check_gather(x, dim, parts, group)
    if group.size == 1 and group.index == 0:
        return Several([Ready(x) for x in xs])
    return transport_of(group, "all_gather").all_gather_many(xs, dims, sizes)


def reduce_scatter_many_start(
    xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], op: str, group: Group
) -> InFlightMany:
    """Start reducing every x over the group, each cut along its dim; see `all_gather_many_start`."""
    for x, dim, parts in zip(xs, dims, sizes, strict=True):
        check_reduction(op, x.dtype)
        _check_scatter(x, dim, parts, group)
    if group.size == 1 and group.index == 0:
        return Several([Ready(x) for x in xs])
    return transport_of(group, "reduce_scatter").reduce_scatter_many(xs, dims, sizes, op)


def all_reduce_many_start(
    xs: Sequence[Tensor], op: str, group: Group, over: bool = False
) -> InFlightMany:
    """Start reducing every x over the group, elementwise; see `all_gather_many_start`.

    over: as in `all_reduce_start`.
    """
    for x in xs:
        check_reduction(op, x.dtype)
    if group.size == 1 and group.index == 0:
        return Several([Ready(x) for x in xs])
    return transport_of(group, "all_reduce").all_reduce_many(xs, op, over)


def all_to_all_start(
    x: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: Group,
) -> InFlight:
    """Start sending piece i of `split_dim` to member i; join those received on `concat_dim`.

    split_sizes: elements along `split_dim` by receiving member. concat_sizes: elements along
    `concat_dim` by sending member. In the pieces received `split_dim` has this member's own split
    size, unless it is `concat_dim`; every other dim is as in `x`.
    """
    transport = None if group.size == 1 and group.index == 0 else transport_of(group, "all_to_all")
    if len(split_sizes) != group.size or not 0 <= split_dim < x.dim() > concat_dim >= 0:
        raise _misfit("split_sizes", split_sizes, f"{group.size} sizes", x, group)
    if x.shape[split_dim] != sum(split_sizes):
        raise _misfit("split_sizes", split_sizes, f"sizes that sum to dim {split_dim}", x, group)
    own = x.shape[concat_dim] if split_dim != concat_dim else split_sizes[group.index]
    if len(concat_sizes) != group.size or concat_sizes[group.index] != own:
        raise _misfit("concat_sizes", concat_sizes, f"{own} at this member", x, group)
    if transport is None:
        return Ready(x)
    return transport.all_to_all(x, split_dim, split_sizes, concat_dim, concat_sizes)


def permute_start(x: Tensor, sends: Sends, recv_shape: Sequence[int], group: Group) -> InFlight:
    """Start sending `x` whole along `sends`, (from, to) pairs of members, the same on every member.

    A member may send to several and receives from at most one; its result has `recv_shape` and
    `x`'s dtype, and is zero when nothing is sent to it. Senders and receivers must agree on the
    number of elements. Raises `UserError` for a member that would receive twice.
    """
    transport = None if group.size == 1 and group.index == 0 else transport_of(group, "permute")
    sources = [source for source, target in sends if target == group.index]
    if len(sources) > 1:
        raise _misfit("sends", sends, "at most one sender for each receiver", x, group)
    if transport is None:
        return Ready(x.reshape(tuple(recv_shape)) if sources else x.new_zeros(recv_shape))
    return transport.permute(x, sends, recv_shape)


def broadcast_start(x: Tensor, root: int, root_shape: Sequence[int], group: Group) -> InFlight:
    """Start sending the `x` of member `root` to all members.

    root_shape: that of the root's `x`, the same on every member. Elsewhere `x` only says the dtype and
    device of the result, and may have any shape. Raises `UserError` for a root that is no member's index.
    """
    transport = None if group.size == 1 and group.index == 0 else transport_of(group, "broadcast")
    if not 0 <= root < group.size:
        raise _misfit("root", root, f"the index of a member, below {group.size}", x, group)
    if group.index == root and x.shape != tuple(root_shape):
        raise _misfit("root_shape", root_shape, "the shape of the root's tensor", x, group)
    return Ready(x) if transport is None else transport.broadcast(x, root, root_shape)


def transport_of(group: Group, op: str) -> Transport:
    """The group's transport; `RunError` for a rank that is no member, or a group not connected."""
    if group.transport is None:
        raise group.refuse(op)
    transport: Transport = group.transport
    return transport


def starter(name: str) -> Callable[..., Any]:
    """The function of this file that starts a collective of the table."""
    start: Callable[..., Any] | None = globals().get(f"{name}_start")
    assert start is not None, f"runtime/comm/collectives.py has no {name}_start"
    return start


def _check_gather(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> None:
    if len(sizes) != group.size or not 0 <= dim < x.dim() or x.shape[dim] != sizes[group.index]:
        raise _misfit("sizes", sizes, f"{group.size} sizes along dim {dim}", x, group)


def _check_scatter(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> None:
    if len(sizes) != group.size or not 0 <= dim < x.dim() or x.shape[dim] != sum(sizes):
        raise _misfit("sizes", sizes, f"{group.size} sizes that sum to dim {dim}", x, group)


def _misfit(field: str, given: object, allowed: str, x: Tensor, group: Group) -> UserError:
    about = f"{allowed} (tensor {tuple(x.shape)}, member {group.index} of {group.ranks})"
    return UserError(field, given, about)
