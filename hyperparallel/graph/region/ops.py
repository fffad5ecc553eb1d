"""The words of a region as torch ops: shapes and gradients, no kernels.

While the code of one rank is traced, its collectives stand in the graph as these ops, one for each record of
`graph/collective_table.py`: the operand, the collective's arguments, which member of how many this rank is,
the axes of the group. `number` counts the calls of a region, so that no two are taken for one because their
arguments happen to be equal on one rank; a gradient's is that of its forward, inverted.

`region` and `region_backward` stand for a whole region in the graph of the whole model, under the number
that the running capture gave it; `token` ties a backward to its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperparallel.graph.collective import CollectiveKind, GroupMember
from hyperparallel.graph.collective_table import KINDS, collective

LIBRARY = torch.library.Library("hyperparallel", "FRAGMENT")
LIBRARY.define("tie(Tensor x, Tensor[] others) -> Tensor")

ops = torch.ops.hyperparallel


def call_op(
    name: str, x: Tensor, args: Sequence[Any], member: GroupMember, axes: Sequence[str], number: int
) -> Tensor:
    """A collective on one member's operand, as an op of the graph being traced."""
    flat = collective(name).flat(args)
    made: Tensor = getattr(ops, name)(x, *flat, member.index, member.count, list(axes), number)
    return made


def _define(kind: CollectiveKind) -> None:
    """The op of a collective: what it makes of shapes, and its gradient from the arguments kept."""
    suffix = "int index, int count, str[] axes, int number"
    LIBRARY.define(f"{kind.name}(Tensor x, {kind.schema()}{suffix}) -> Tensor")

    def fake(x: Tensor, *rest: Any) -> Tensor:
        *flat, index, count, _, _ = rest
        return x.new_empty(kind.returns(tuple(x.shape), GroupMember(index, count), *kind.parsed(flat)))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shape, ctx.rest = inputs[0].shape, inputs[1:]

    def transposed(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # ~number is negative: no call of the forward has it, so forward and gradient are never one node.
        *flat, index, count, axes, number = ctx.rest
        member = GroupMember(index, count)

        def communicate(name: str, x: Tensor, *args: Any) -> Tensor:
            return call_op(name, x, args, member, axes, ~number)

        made = kind.gradient(communicate, grad, tuple(ctx.shape), member, *kind.parsed(flat))
        return (made, *(None for _ in ctx.rest))

    torch.library.register_fake(f"hyperparallel::{kind.name}", fake, lib=LIBRARY)
    torch.library.register_autograd(
        f"hyperparallel::{kind.name}", transposed, setup_context=keep, lib=LIBRARY
    )


for _kind in KINDS.values():
    _define(_kind)


def _keep_tied(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.tied = [(x.shape, x.dtype, x.device) for x in inputs[1]]


def _untie(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Zeros for what was tied in, so that its own backward runs on every rank."""
    return grad, [torch.zeros(shape, dtype=kind, device=where) for shape, kind, where in ctx.tied]


torch.library.register_fake("hyperparallel::tie", lambda x, others: x.new_empty(x.shape), lib=LIBRARY)
torch.library.register_autograd("hyperparallel::tie", _untie, setup_context=_keep_tied, lib=LIBRARY)

COLLECTIVE_OPS = {getattr(ops, name).default: kind for name, kind in KINDS.items()}
"""Every op that communicates, and the collective that it is."""
