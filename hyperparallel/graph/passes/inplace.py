"""Find results that may take the place of a dead operand: `a.add_(b)` for a + b, a sum over ranks where
it lies.

Needs the final order of one stage: an operand is dead if neither it nor anything that shares its memory
is read later or handed on. Memory is shared through views, through ops that are not known to make
something new, and through collectives until their result is dead, so nothing under way is overwritten.
An all-reduce over its operand leaves its result there: the operand's memory lives on as the result's.
What comes from outside the stage (parameters, inputs, constants, saved values) is never written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.peephole.rewrite import same_dtype, same_value_shape
from hyperparallel.shard.rules.rule import UNKNOWN_OP, OpFacts
from hyperparallel.shard.rules.table import facts_of

_REDUCTIONS = (communication.all_reduce_start, communication.all_reduce_many_start)
_FOREIGN = object()
"""Stands for memory that must not be written to: not ours, or read at several places at once."""


def reusable(
    nodes: Sequence[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> dict[fx.Node, int]:
    """For each node that may write its result over an operand, the position of that operand."""
    memory = _Memory(nodes, inputs, outputs)
    found: dict[fx.Node, int] = dict.fromkeys(memory.reduced, 0)
    for i, node in enumerate(nodes):
        for position in _facts(node).in_place:
            if memory.may_write(node, position, i):
                found[node] = position  # the operand's block is dead: node's own stands for it now
                break
    return found


def _facts(node: fx.Node) -> OpFacts:
    """Of the op that a node calls; nothing is known of other functions."""
    return facts_of(str(node.target)) if isinstance(node.target, torch._ops.OpOverload) else UNKNOWN_OP


def _listed(operand: Any) -> Sequence[fx.Node]:
    """The operand of a collective of one tensor, or those of many."""
    return [operand] if isinstance(operand, fx.Node) else list(operand)


class _Memory:
    """Which blocks of memory each value may lie in, and when each block is read last.

    reduced: the starts of all-reduces that may write their results over their operands.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]
    ) -> None:
        self.kept = set(outputs)
        self.blocks: dict[fx.Node, set[Any]] = {node: {node, _FOREIGN} for node in inputs}
        self.reduced: set[fx.Node] = set()
        last_use: dict[fx.Node, float] = {}
        for i, node in enumerate(nodes):
            last_use.update(dict.fromkeys(node.all_input_nodes, i))
        # What is handed on is read outside of this stage, at any time.
        last_use.update(dict.fromkeys(self.kept, math.inf))
        self.last_read: dict[Any, float] = {}
        for i, node in enumerate(nodes):
            if node.target in _REDUCTIONS and self._may_reduce(node, i, last_use):
                self.reduced.add(node)
            self.blocks[node] = self._blocks(node)
            for block in self.blocks[node]:
                self.last_read[block] = max(self.last_read.get(block, -1), last_use.get(node, -1))

    def _may_reduce(self, start: fx.Node, now: int, last_use: Mapping[fx.Node, float]) -> bool:
        """Whether nobody reads the operands' memory behind an all-reduce but for its result.

        Values made later share it only by reading, later than `now`, one that was there before.
        """
        taken: set[Any] = set()
        for operand in _listed(start.args[0]):
            mine = self.blocks[operand]
            if _FOREIGN in mine or mine & taken:
                return False
            taken |= mine
        return not any(last_use.get(n, -1) > now for n, blocks in self.blocks.items() if blocks & taken)

    def _blocks(self, node: fx.Node) -> set[Any]:
        facts = _facts(node)
        if facts.fresh:
            return {node}
        # May be any operand's memory: what keeps one of its blocks alive keeps all.
        shared = set().union(*(self.blocks[used] for used in node.all_input_nodes))
        if node in self.reduced or (node.target is communication.wait and node.args[0] in self.reduced):
            return shared
        # A view may repeat elements (expand): a write to one would hit others.
        return shared if facts.same_elements else {node, _FOREIGN, *shared}

    def may_write(self, node: fx.Node, position: int, now: int) -> bool:
        """Whether the operand at `position` is ours, dead after `node`, and like its result."""
        # With a second operand in front, keywords would be wrong: in a + alpha * b, alpha belongs to b.
        if position >= len(node.args) or (position and node.kwargs):
            return False
        operand = node.args[position]
        # Written over a transposed operand, what is handed on would have the strides of that view.
        if not isinstance(operand, fx.Node) or (node in self.kept and _facts(operand).same_elements):
            return False
        mine = self.blocks[operand]
        if _FOREIGN in mine or any(self.last_read[block] > now for block in mine):
            return False
        # x * t(x) written over x would read what it has written.
        others = [a for i, a in enumerate(node.args) if i != position and isinstance(a, fx.Node)]
        if any(mine & self.blocks[other] for other in others):
            return False
        return same_value_shape(operand, node) and same_dtype(operand, node)
