"""How long ago a rank last touched the memory that an instruction moves: what caches may still hold.

The distance of an access is the bytes that the rank has touched since the block was touched before (an upper
bound of the reuse distance, Mattson et al. 1970, that counts repeats). A new block takes over the freed block
of its size that was touched last, as allocators do; there was none: it is as far as anything can be.

Leaves out that allocators split and join blocks, and the buffers of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hyperparallel.shard.rules.table import facts_of
from hyperparallel.workload.instruction import Instruction


def with_reuse(
    found: Sequence[Instruction], nodes: Sequence[fx.Node], made: Mapping[fx.Node, Any]
) -> list[Instruction]:
    """The instructions of nodes with their accesses; made: what each node made, inputs included."""
    memory = _Memory()
    # The last node that has a block among its operands or results frees it.
    last = {block: i for i, node in enumerate(nodes) for block in _blocks(node, made)}
    results = []
    for i, (one, node) in enumerate(zip(found, nodes, strict=True)):
        read = [x for used in node.all_input_nodes for x in tensors(made[used])]
        written = tensors(made[node])
        if facts_of(str(node.target)).looks_up:
            memory.touch_far(sum(map(_num_bytes, written)))  # the rows that were looked up
            read = read[1:]
        if one.role != "op" or one.num_bytes:
            for x in {storage(x): x for x in (*read, *written)}.values():
                memory.touch(x)
        accesses = memory.accesses()
        results.append(replace(one, reuse=accesses if one.role == "op" else ()))
        for block in _blocks(node, made):
            if last[block] == i:
                memory.free(block)
    return results


class _Memory:
    """Blocks by when they were last touched, in bytes touched until then."""

    def __init__(self) -> None:
        self.touched = 0.0
        self.last: dict[int, float] = {}
        self.sizes: dict[int, int] = {}
        self.freed: dict[int, list[float]] = {}
        self.now: list[tuple[float, float]] = []

    def touch(self, x: Tensor) -> None:
        block, size = storage(x), x.untyped_storage().nbytes()
        if block not in self.sizes:
            self.sizes[block] = size
            # Allocators hand out the block of that size that was freed last, which may be in a cache.
            if self.freed.get(size):
                self.last[block] = self.freed[size].pop()
        num_bytes = _num_bytes(x)
        self.now.append((self.touched - self.last.get(block, -math.inf), num_bytes))
        self.last[block] = self.touched

    def touch_far(self, num_bytes: float) -> None:
        self.now.append((math.inf, num_bytes))

    def accesses(self) -> tuple[tuple[float, float], ...]:
        """(distance, bytes) of what was touched since the last call."""
        found, self.now = tuple(self.now), []
        self.touched += sum(num_bytes for _, num_bytes in found)
        return found

    def free(self, block: int) -> None:
        if block in self.sizes:
            self.freed.setdefault(self.sizes[block], []).append(self.last[block])


def _blocks(node: fx.Node, made: Mapping[fx.Node, Any]) -> set[int]:
    used = (made[other] for other in node.all_input_nodes)
    return {storage(x) for value in (made[node], *used) for x in tensors(value)}


def _num_bytes(x: Tensor) -> int:
    # An expanded tensor has more elements than memory; a slice less than the block that it lies in.
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nested values."""
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def storage(x: Tensor) -> int:
    """Tells the memory blocks of living tensors apart."""
    return int(x.untyped_storage()._cdata)
