"""Write the way from one layout to another into a rank's program, as explicit nodes.

`layout.reshard` finds the steps; here each step becomes nodes on local tensors: a slice, or a collective
in two halves (start and wait). Specs with inner cuts are first viewed under a finer shape where both
are plain layouts; where no such shape exists the tensor is made whole and cut again.

Sums of 16-bit floats are added in float32: a cast goes in front of the first reduction of a way and back
behind the last, so that what else moves does so in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperparallel.errors import LayoutError
from hyperparallel.graph import communication
from hyperparallel.layout import (
    AllGather,
    AllReduce,
    AllToAll,
    Layout,
    Pend,
    Permute,
    ReduceScatter,
    Slice,
    Step,
    reshard,
)
from hyperparallel.shard.op_seconds import StepSeconds, reduce_dtype
from hyperparallel.shard.spec import Spec, common_view, make_spec
from hyperparallel.workload import Value

aten = torch.ops.aten
Emit = Callable[..., Any]


@dataclass(frozen=True)
class Redistributor:
    """Emits redistributions of one value for one rank.

    reduce: the dtype that carries reductions of 16-bit floats. emit(fn, *args) adds a node; collect(node,
    kind, axes, num_bytes, dtype, held_bytes) notes what a collective moves, and holds while it is under way;
    the dtype and the size of an item are in the node's meta. costs: seconds of a step, so that what runs is
    what decisions were priced with; None where the steps are given (`along`).
    """

    rank: int
    value: Value
    reduce: str
    emit: Emit
    collect: Callable[[Any, str, tuple[str, ...], int, str, int], None]
    costs: StepSeconds | None = None

    def __call__(self, x: Any, src: Spec, dst: Spec) -> Any:
        """`x` laid out as `dst`; `LayoutError` where that is no matter of one mesh and one memory tier."""
        if src == dst:
            return x
        if src.mesh != dst.mesh or src.tier != dst.tier:
            given = f"{src.layout()} -> {dst.layout()}"
            allowed = "two layouts on one mesh and in one memory tier"
            raise LayoutError(f"layout of {self.value.name}", given, allowed)
        view = common_view(src, dst)
        if view is None:
            # Cuts of a merged dim that no shape shows as plain ones: gathered, then cut again.
            whole = make_spec(src.mesh, [[(size, ())] for size in src.shape])
            return self(self(x, src, whole), whole, dst)
        shape, src_layout, dst_layout = view
        # Under the finer shape an inner cut (of heads in heads x width) is a plain cut of a dim of its own.
        finer = shape != src.shape
        if finer:
            x = self.emit(aten.reshape.default, x, list(src_layout.local_shape(shape, self.rank)))
        # With the costs that decisions were made with: by bytes alone another way might be shorter.
        steps = reshard(src_layout, dst_layout, shape, self.value.itemsize, self.costs)
        x = self.along(x, steps, shape)
        return self.emit(aten.reshape.default, x, list(dst.local_shape(self.rank))) if finer else x

    def along(self, x: Any, steps: Sequence[Step], shape: tuple[int, ...]) -> Any:
        """`x`, a piece of a tensor of global `shape`, after steps on one mesh."""
        # Cast once for all reductions between the first and the last, not around each.
        wide = [i for i, step in enumerate(steps) if self._reduce_dtype(step) != self.value.dtype]
        for i, step in enumerate(steps):
            if wide and i == wide[0]:
                x = self.emit(aten._to_copy.default, x, dtype=getattr(torch, self._reduce_dtype(step)))
            # Between two reductions the value stays wide, so what else moves there is as wide.
            inside = wide and wide[0] <= i <= wide[-1]
            lies_in = self._reduce_dtype(steps[wide[0]]) if inside else self.value.dtype
            x = self._step(x, step, shape, lies_in)
            if wide and i == wide[-1]:
                x = self.emit(aten._to_copy.default, x, dtype=getattr(torch, self.value.dtype))
        return x

    def _reduce_dtype(self, step: Step) -> str:
        """The dtype in which the value goes through a step, seen alone."""
        how = step.op if isinstance(step, (AllReduce, ReduceScatter)) else ""
        return reduce_dtype(self.value.dtype, how, self.reduce)

    def _note(self, node: Any, step: Step, shape: tuple[int, ...], dtype: str) -> None:
        itemsize = getattr(torch, dtype).itemsize
        node.meta.update(itemsize=itemsize, dtype=dtype)
        # Of the fullest rank: all ranks must weigh alike, or they would order their starts differently.
        held = max(math.prod(end.largest_shape(shape)) for end in (step.src, step.dst))
        moved = step.num_elements(shape) * itemsize
        self.collect(node, _kind(step), step.axes, moved, dtype, held * itemsize)

    def _step(self, x: Any, step: Step, shape: tuple[int, ...], dtype: str) -> Any:
        match step:
            case Slice():
                return self._slice(x, step, shape)
            case Pend():
                return self._pend(x, step)
            case Permute():
                return self._exchange(x, step, shape, dtype)
            case _:
                started = self._start(x, step, shape)
                self._note(started, step, shape, dtype)
                return self.emit(communication.wait, started)

    def _start(self, x: Any, step: Step, shape: tuple[int, ...]) -> Any:
        members = step.src.mesh.group(self.rank, step.axes)

        def sizes(layout: Layout, dim: int) -> list[int]:
            return [layout.local_shape(shape, member)[dim] for member in members]

        match step:
            case AllReduce():
                return self.emit(communication.all_reduce_start, x, step.op, step.axes)
            case AllGather():
                have = sizes(step.src, step.dim)
                return self.emit(communication.all_gather_start, x, step.dim, have, step.axes)
            case ReduceScatter():
                want = sizes(step.dst, step.dim)
                return self.emit(communication.reduce_scatter_start, x, step.dim, want, step.op, step.axes)
            case AllToAll():
                split, concat = sizes(step.dst, step.to_dim), sizes(step.src, step.from_dim)
                return self.emit(
                    communication.all_to_all_start,
                    x, step.to_dim, split, step.from_dim, concat, step.axes,
                )  # fmt: skip
        raise AssertionError(f"no way to write {step}")

    def _exchange(self, x: Any, step: Permute, shape: tuple[int, ...], dtype: str) -> Any:
        """Every rank packs what others lack, one all-to-all of uneven flat pieces, and unpacks."""
        members = step.src.mesh.group(self.rank, step.axes)
        # With an entry for each member, empty ones too: sizes are given by member, in the order of the group.
        sends: dict[int, list[communication.Box]] = {member: [] for member in members}
        takes: dict[int, list[communication.Box]] = {member: [] for member in members}
        for part in step.blocks(shape):
            if part.src_rank == self.rank:
                sends[part.dst_rank].append(box_of(part.src_slices))
            if part.dst_rank == self.rank:
                takes[part.src_rank].append(box_of(part.dst_slices))
        flat = self.emit(communication.pack, x, [b for blocks in sends.values() for b in blocks])
        started = self.emit(
            communication.all_to_all_start,
            flat, 0, [num_elements(b) for b in sends.values()], 0,
            [num_elements(b) for b in takes.values()], step.axes,
        )  # fmt: skip
        self._note(started, step, shape, dtype)
        received = self.emit(communication.wait, started)
        local = list(step.dst.local_shape(shape, self.rank))
        blocks = [b for taken in takes.values() for b in taken]
        return self.emit(communication.unpack, received, blocks, local)

    def _slice(self, x: Any, step: Slice, shape: tuple[int, ...]) -> Any:
        # Slices count from the start of the whole; the local tensor starts where its own piece does.
        old = step.src.slices(shape, self.rank)[step.dim]
        new = step.dst.slices(shape, self.rank)[step.dim]
        return self.emit(aten.slice.Tensor, x, step.dim, new.start - old.start, new.stop - old.start)

    def _pend(self, x: Any, step: Pend) -> Any:
        # One member keeps the value; which one is free, the first is the same on all ranks.
        first = step.src.mesh.group(self.rank, step.axes)[0] == self.rank
        return self.emit(communication.pend, x, step.op, first)


def box_of(slices: Sequence[slice]) -> communication.Box:
    """Slices as what `communication.pack` takes."""
    return tuple((part.start, part.stop - part.start) for part in slices)


def num_elements(blocks: Sequence[communication.Box]) -> int:
    """Elements in blocks together."""
    return sum(math.prod(length for _, length in block) for block in blocks)


def _kind(step: Step) -> str:
    name = type(step).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
