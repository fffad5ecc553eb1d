"""Find results that may take the place of a dead operand: `a.add_(b)` for a + b.

Needs the final order of one stage: an operand is dead if neither it nor anything that shares its memory
is read later or handed on. Memory is shared through views, through ops that are not known to make
something new, and through collectives until their result is dead, so nothing under way is overwritten.
What comes from outside the stage (parameters, inputs, constants, saved values) is never written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import aten, same_dtype, same_value_shape

_FOREIGN = object()
"""Stands for memory that must not be written to: not ours, or read at several places at once."""

_UNARY = ("neg", "rsqrt", "exp", "sigmoid", "tanh", "sqrt", "reciprocal")
IN_PLACE: Mapping[Any, tuple[int, ...]] = {
    aten.add.Tensor: (0, 1),
    aten.mul.Tensor: (0, 1),
    aten.sub.Tensor: (0,),
    aten.div.Tensor: (0,),
    aten.addcmul.default: (0,),
    aten.addmm.default: (0,),
    aten.baddbmm.default: (0,),
    **{getattr(aten, name).default: (0,) for name in _UNARY},
}
"""Targets with an in-place form, and the operands whose memory their result may take."""

_NEW = {
    *IN_PLACE,
    *(
        getattr(aten, name).default
        for name in (
            "mm", "bmm", "mv", "addmv", "cat", "clone", "roll", "sum", "mean", "embedding", "slice_backward",
            "silu", "silu_backward", "gelu", "gelu_backward", "relu", "threshold_backward", "tanh_backward",
            "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
        )
    ),
    *(getattr(aten, name).Scalar for name in ("add", "mul", "sub", "div")),
    aten.pow.Tensor_Scalar,
    aten.sum.dim_IntList,
    aten.mean.dim,
}  # fmt: skip
"""Targets whose result never shares memory with an operand."""

_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.detach.default,
}
"""Targets whose result has every element of the operand once, perhaps in the same memory."""


def reusable(
    nodes: Sequence[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> dict[fx.Node, int]:
    """For each node that may write its result over an operand, the position of that operand."""
    memory = _Memory(nodes, inputs, outputs)
    found: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for position in IN_PLACE.get(node.target, ()):
            if memory.may_write(node, position, i):
                found[node] = position  # the operand's block is dead: node's own stands for it now
                break
    return found


class _Memory:
    """Which blocks of memory each value may lie in, and when each block is read last."""

    def __init__(
        self, nodes: Sequence[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]
    ) -> None:
        self.kept = set(outputs)
        self.blocks: dict[fx.Node, set[Any]] = {node: {node, _FOREIGN} for node in inputs}
        last_use: dict[fx.Node, float] = {}
        for i, node in enumerate(nodes):
            last_use.update(dict.fromkeys(node.all_input_nodes, i))
        last_use.update(dict.fromkeys(self.kept, math.inf))
        self.last_read: dict[Any, float] = {}
        for node in nodes:
            self.blocks[node] = self._blocks(node)
            for block in self.blocks[node]:
                self.last_read[block] = max(self.last_read.get(block, -1), last_use.get(node, -1))

    def _blocks(self, node: fx.Node) -> set[Any]:
        if node.target in _NEW:
            return {node}
        shared = set().union(*(self.blocks[used] for used in node.all_input_nodes))
        return shared if node.target in _VIEWS else {node, _FOREIGN, *shared}

    def may_write(self, node: fx.Node, position: int, now: int) -> bool:
        """Whether the operand at `position` is ours, dead after `node`, and like its result."""
        if position >= len(node.args) or (position and node.kwargs):
            return False
        operand = node.args[position]
        if not isinstance(operand, fx.Node) or (node in self.kept and operand.target in _VIEWS):
            return False
        mine = self.blocks[operand]
        if _FOREIGN in mine or any(self.last_read[block] > now for block in mine):
            return False
        others = [a for i, a in enumerate(node.args) if i != position and isinstance(a, fx.Node)]
        if any(mine & self.blocks[other] for other in others):
            return False
        return same_value_shape(operand, node) and same_dtype(operand, node)
