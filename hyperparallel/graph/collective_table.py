"""Every collective there is, one record each; what a record says is told by `collective.py`.

All tables that list collectives follow from `COLLECTIVES` by name: the words of a program
(`communication.py`), the code generator and virtual ranks (`runtime/exec/`), the ops, emulation, rehearsal
and segments of regions (`region/`), debug mode (`runtime/comm/debug.py`), the simulator's instructions
(`predict/instructions.py`). So a new one is a class here, and what moves its bytes: its start function in
`runtime/comm/collectives.py` and a method of each transport. For use in regions it also needs a function in
`region/user_calls.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hyperparallel.errors import UserError
from hyperparallel.graph.collective import (
    Call,
    CollectiveKind,
    Communicate,
    GroupMember,
    ManyCollective,
    Shape,
)

REDUCE_OPS = ("sum", "max", "min", "prod", "avg")

Pairs = Sequence[tuple[int, int]]
"""(from, to) members."""


class _AllReduce(CollectiveKind):
    """Every member gets the reduction of all members' operands."""

    name, arguments, num_listed = "all_reduce", {"op": "str"}, 0

    def returns(self, shape: Shape, member: GroupMember, op: str) -> Shape:
        return shape

    def compute(self, calls: Sequence[Call]) -> list[Tensor]:
        return _copies(reduce_in_order([x for x, _ in calls], calls[0][1]), len(calls))

    def received(self, shape: Shape, member: GroupMember, op: str) -> int:
        """A reduce-scatter, then a gather."""
        return 2 * (member.count - 1) * -(-math.prod(shape) // member.count)

    def gradient(
        self, communicate: Communicate, grad: Tensor, shape: Shape, member: GroupMember,
        op: str,
    ) -> Tensor:  # fmt: skip
        _check_linear(self.name, op)
        # Every member has the sum of all x, so each x gets the sum of all gradients (avg: their average).
        return communicate("all_reduce", grad, op)

    def misfit(self, shapes: Sequence[Shape], rows: Sequence[Call]) -> str:
        return _unlike(shapes)


class _AllGather(CollectiveKind):
    """Every member gets all operands joined along `dim`, where they have the given sizes."""

    name, arguments, num_listed = "all_gather", {"dim": "int", "sizes": "ints"}, 2

    def returns(self, shape: Shape, member: GroupMember, dim: int, sizes: Sequence[int]) -> Shape:
        return resized(shape, dim, sum(sizes))

    def compute(self, calls: Sequence[Call]) -> list[Tensor]:
        return _copies(torch.cat([x for x, _, _ in calls], calls[0][1]), len(calls))

    def received(self, shape: Shape, member: GroupMember, dim: int, sizes: Sequence[int]) -> int:
        return math.prod(resized(shape, dim, sum(sizes) - sizes[member.index]))

    def gradient(
        self, communicate: Communicate, grad: Tensor, shape: Shape, member: GroupMember,
        dim: int, sizes: Sequence[int],
    ) -> Tensor:  # fmt: skip
        # Every member's result holds this operand: its gradient is the sum of theirs.
        return communicate("reduce_scatter", grad, dim, sizes, "sum")

    def misfit(self, shapes: Sequence[Shape], rows: Sequence[Call]) -> str:
        return _unlike(shapes, rows[0][0])


class _ReduceScatter(CollectiveKind):
    """Member i gets the i-th piece along `dim`, of the given sizes, of the reduction of all operands."""

    name, num_listed = "reduce_scatter", 2
    arguments: ClassVar[Mapping[str, str]] = {"dim": "int", "sizes": "ints", "op": "str"}

    def returns(self, shape: Shape, member: GroupMember, dim: int, sizes: Sequence[int], op: str) -> Shape:
        return resized(shape, dim, sizes[member.index])

    def compute(self, calls: Sequence[Call]) -> list[Tensor]:
        _, dim, sizes, op = calls[0]
        total = reduce_in_order([x for x, *_ in calls], op)
        return [piece.contiguous() for piece in total.split(list(sizes), dim)]

    def received(self, shape: Shape, member: GroupMember, dim: int, sizes: Sequence[int], op: str) -> int:
        """Other members' shares of the piece that this one keeps."""
        return (member.count - 1) * math.prod(self.returns(shape, member, dim, sizes, op))

    def gradient(
        self, communicate: Communicate, grad: Tensor, shape: Shape, member: GroupMember,
        dim: int, sizes: Sequence[int], op: str,
    ) -> Tensor:  # fmt: skip
        _check_linear(self.name, op)
        made = communicate("all_gather", grad, dim, sizes)
        # Each operand went in with the weight 1/n.
        return made / len(sizes) if op == "avg" else made

    def misfit(self, shapes: Sequence[Shape], rows: Sequence[Call]) -> str:
        return _unlike(shapes)


class _AllToAll(CollectiveKind):
    """Member i gets the i-th piece along `split_dim` of every operand, joined along `concat_dim`.

    split_sizes: by receiving member; concat_sizes: by sending member.
    """

    name, one_round = "all_to_all", True
    own = frozenset({"split_sizes", "concat_sizes"})
    arguments: ClassVar[Mapping[str, str]] = {
        "split_dim": "int", "split_sizes": "ints", "concat_dim": "int", "concat_sizes": "ints",
    }  # fmt: skip

    def returns(
        self, shape: Shape, member: GroupMember, split_dim: int, split_sizes: Sequence[int],
        concat_dim: int, concat_sizes: Sequence[int],
    ) -> Shape:  # fmt: skip
        cut = resized(shape, split_dim, split_sizes[member.index])
        return resized(cut, concat_dim, sum(concat_sizes))

    def compute(self, calls: Sequence[Call]) -> list[Tensor]:
        pieces = [x.split(list(sizes), dim) for x, dim, sizes, _, _ in calls]
        return [torch.cat([row[i] for row in pieces], call[3]) for i, call in enumerate(calls)]

    def received(
        self, shape: Shape, member: GroupMember, split_dim: int, split_sizes: Sequence[int],
        concat_dim: int, concat_sizes: Sequence[int],
    ) -> int:  # fmt: skip
        cut = resized(shape, split_dim, split_sizes[member.index])
        return math.prod(resized(cut, concat_dim, sum(concat_sizes) - concat_sizes[member.index]))

    def gradient(
        self, communicate: Communicate, grad: Tensor, shape: Shape, member: GroupMember,
        split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
    ) -> Tensor:  # fmt: skip
        # The transpose sends every piece back: what was joined is split, and the other way round.
        return communicate("all_to_all", grad, concat_dim, concat_sizes, split_dim, split_sizes)

    def misfit(self, shapes: Sequence[Shape], rows: Sequence[Call]) -> str:
        # Joined where it was split, a dim may have another size on every member; else all cut it alike.
        split_dim, _, concat_dim, _ = rows[0]
        unlike, same_dim = _unlike(shapes, split_dim, concat_dim), split_dim == concat_dim
        if unlike:
            return unlike
        for i, (shape, (_, split_sizes, _, _)) in enumerate(zip(shapes, rows, strict=True)):
            for j, (_, own_sizes, _, concat_sizes) in enumerate(rows):
                sent = split_sizes[j] if same_dim else shape[concat_dim]
                if concat_sizes[i] != sent or (not same_dim and split_sizes[j] != own_sizes[j]):
                    return f"member {j} expects another size than member {i} sends"
        return ""


class _Permute(CollectiveKind):
    """Operands go along (from, to) pairs of members; zeros of `recv_shape` where nothing arrives."""

    name, one_round, own = "permute", True, frozenset({"recv_shape"})
    arguments: ClassVar[Mapping[str, str]] = {"sends": "pairs", "recv_shape": "ints"}

    def returns(self, shape: Shape, member: GroupMember, sends: Pairs, recv_shape: Sequence[int]) -> Shape:
        return tuple(recv_shape)

    def compute(self, calls: Sequence[Call]) -> list[Tensor]:
        # A member where nothing arrives keeps its zeros.
        results = [x.new_zeros(tuple(shape)) for x, _, shape in calls]
        for source, target in calls[0][1]:
            results[target] = calls[source][0].reshape(tuple(calls[target][2])).clone()
        return results

    def received(self, shape: Shape, member: GroupMember, sends: Pairs, recv_shape: Sequence[int]) -> int:
        """Nothing where no pair ends at the member, and what it sends itself crosses no link."""
        arrives = any(target == member.index != source for source, target in sends)
        return math.prod(recv_shape) if arrives else 0

    def gradient(
        self, communicate: Communicate, grad: Tensor, shape: Shape, member: GroupMember,
        sends: Pairs, recv_shape: Sequence[int],
    ) -> Tensor:  # fmt: skip
        back = [(target, source) for source, target in sends]
        return communicate("permute", grad, back, list(shape))

    def misfit(self, shapes: Sequence[Shape], rows: Sequence[Call]) -> str:
        for source, target in rows[0][0]:
            if math.prod(shapes[source]) != math.prod(rows[target][1]):
                return f"member {target} expects another size than member {source} sends"
        return ""


class _Broadcast(CollectiveKind):
    """Every member gets the operand of `root`, which has `root_shape`; other operands are not looked at."""

    name = "broadcast"
    arguments: ClassVar[Mapping[str, str]] = {"root": "int", "root_shape": "ints"}

    def returns(self, shape: Shape, member: GroupMember, root: int, root_shape: Sequence[int]) -> Shape:
        return tuple(root_shape)

    def compute(self, calls: Sequence[Call]) -> list[Tensor]:
        source = calls[calls[0][1]][0]
        return [source.clone(memory_format=torch.contiguous_format) for _ in calls]

    def received(self, shape: Shape, member: GroupMember, root: int, root_shape: Sequence[int]) -> int:
        """The root's link carries as much out as any other's in."""
        return math.prod(root_shape)

    def gradient(
        self, communicate: Communicate, grad: Tensor, shape: Shape, member: GroupMember,
        root: int, root_shape: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """The sum of all members' on the root, by a reduce-scatter with a piece for it alone, else zeros."""
        # A reduction onto one member: the other pieces are empty, so nothing else moves.
        sizes = [math.prod(root_shape) if i == root else 0 for i in range(member.count)]
        total = communicate("reduce_scatter", grad.reshape(-1), 0, sizes, "sum")
        if member.index == root:
            return total.view(shape)
        # Empty here, but made of it all the same: every rank must have the collective in its backward.
        return torch.cat([total, grad.new_zeros(math.prod(shape))]).view(shape)

    def misfit(self, shapes: Sequence[Shape], rows: Sequence[Call]) -> str:
        root, root_shape = rows[0]
        fits = tuple(shapes[root]) == tuple(root_shape)
        return "" if fits else "root_shape is not the shape of the root's operand"


def resized(shape: Sequence[int], dim: int, size: int) -> Shape:
    """A shape with another size in one dim.

    >>> resized((2, 3), 1, 5)
    (2, 5)
    """
    return (*shape[:dim], size, *shape[dim + 1 :])


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise `UserError` unless values of `dtype` can be reduced with `op`."""
    if op not in REDUCE_OPS:
        raise UserError("op", op, "one of " + ", ".join(REDUCE_OPS))
    if dtype == torch.bool and op not in ("max", "min"):
        raise UserError("op", op, "max or min for booleans", instead="max (any) or min (all)")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise UserError("op", op, f"sum, max, min, prod for {dtype}")
    if dtype.is_complex and op not in ("sum", "avg"):
        raise UserError("op", op, f"sum or avg for {dtype}")


def reduce_in_order(tensors: Sequence[Tensor], op: str) -> Tensor:
    """The reduction of equal-shaped tensors, first to last; 16-bit floats are summed in float32.

    >>> reduce_in_order([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])], "max")
    tensor([3., 5.])
    """
    dtype = tensors[0].dtype
    check_reduction(op, dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    # A copy of a single operand: the result must not be its memory.
    total = tensors[0].to(wide, copy=len(tensors) == 1)
    for tensor in tensors[1:]:  # not in place: autograd may look at a factor again
        if op in ("sum", "avg"):
            total = total + tensor
        elif op == "prod":
            total = total * tensor
        else:
            total = (torch.maximum if op == "max" else torch.minimum)(total, tensor.to(wide))
    return (total.div_(len(tensors)) if op == "avg" else total).to(dtype).contiguous()


def _copies(result: Tensor, count: int) -> list[Tensor]:
    """One tensor a member: a rank may later write into its own."""
    return [result, *(result.clone() for _ in range(count - 1))]


def _check_linear(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise UserError(
            f"gradient through {name}", op, "sum or avg", "a detached tensor (x.detach()) as its operand"
        )


def _unlike(shapes: Sequence[Shape], *free: int) -> str:
    """What to say of shapes that differ in other dims than the free ones."""
    kept = {(len(shape), *(n for d, n in enumerate(shape) if d not in free)) for shape in shapes}
    return "shape differs" if len(kept) > 1 else ""


KINDS: Mapping[str, CollectiveKind] = {
    kind.name: kind
    for kind in (_AllReduce(), _AllGather(), _ReduceScatter(), _AllToAll(), _Permute(), _Broadcast())
}
"""Name -> the collective of one tensor."""

_OF_MANY = [ManyCollective(kind) for kind in KINDS.values() if kind.num_listed is not None]

COLLECTIVES: Mapping[str, CollectiveKind | ManyCollective] = {
    **KINDS, **{many.name: many for many in _OF_MANY},
}  # fmt: skip
"""Those, and the ones of many tensors."""


def collective(name: str) -> CollectiveKind:
    """The collective of that name; there must be one."""
    assert name in KINDS, f"no collective is called {name}; there are {', '.join(KINDS)}"
    return KINDS[name]
