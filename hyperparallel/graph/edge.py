"""Edges: a value goes from the layout in which one part leaves it to the one in which another takes it.

The way is `layout.reshard`'s: steps on the mesh that it leaves, one exchange between the meshes
(`SendRecv`), steps on the mesh where it lands. Here each stretch becomes a graph of explicit nodes for one
rank, like those of a rank's program: start and wait apart, and pieces packed flat. A rank that is only in
one of the meshes has only that side; a rank in both keeps what it holds already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.redistribute import Redistributor, box_of, num_elements
from hyperparallel.graph.program import Transfer
from hyperparallel.layout import Layout, Mesh, SendRecv, Step, reshard
from hyperparallel.workload import Value

BETWEEN: tuple[str, ...] = ()
"""The axes of an exchange between meshes: it goes along none, but from one mesh to the other."""


@dataclass(frozen=True)
class Edge:
    """One value on its way between two parts. src: as `source` leaves it; dst: as `target` takes it.

    name: what the parts call it among their inputs and results. is_lent: it is a parameter of `source`, which
    changes between steps only. reduce: the dtype that carries sums of 16-bit floats, as the plans say
    (`Plan.reduce`).
    """

    name: str
    value: Value
    source: int
    target: int
    backward: bool
    src: Layout
    dst: Layout
    is_lent: bool = False
    reduce: str = "float32"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part: those that have it, then the others that get it."""
        mine = self.src.mesh.ranks
        return (*mine, *(rank for rank in self.dst.mesh.ranks if rank not in mine))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The way from one layout to the other."""
        return reshard(self.src, self.dst, self.value.shape, self.value.itemsize)

    def __str__(self) -> str:
        """The edge in words, for ranks to compare."""
        return f"{self.name} from part {self.source} to {self.target}: " + "; ".join(map(str, self.steps))


@dataclass(frozen=True)
class EdgeLeg:
    """A graph from one local tensor to another. mesh: whose axes its collectives name; None: `BETWEEN`."""

    graph: fx.Graph
    mesh: Mesh | None

    @property
    def nodes(self) -> list[fx.Node]:
        """What runs, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def result(self) -> fx.Node:
        """The node that the graph returns."""
        returned: Any = next(iter(reversed(self.graph.nodes))).args[0]
        found: fx.Node = returned
        return found

    def transfers(self) -> list[Transfer]:
        """Its collectives, in order."""
        return [n.meta["transfer"] for n in self.graph.nodes if "transfer" in n.meta]


def legs_of(edge: Edge, rank: int) -> list[EdgeLeg]:
    """What `rank` does for an edge; of ranks that only receive, the first takes an empty flat tensor."""
    steps = edge.steps
    # At most one exchange: a way leaves one mesh once and lands on the other.
    before = list(takewhile(lambda step: not isinstance(step, SendRecv), steps))
    between, after = steps[len(before) : len(before) + 1], steps[len(before) + 1 :]
    found = []
    if rank in edge.src.mesh.ranks and before:
        found.append(EdgeLeg(_Writer(edge, rank).along(before), edge.src.mesh))
    for step in between:
        assert isinstance(step, SendRecv)
        found.append(EdgeLeg(_Writer(edge, rank).exchange(step), None))
    if rank in edge.dst.mesh.ranks and after:
        found.append(EdgeLeg(_Writer(edge, rank).along(after), edge.dst.mesh))
    return found


class _Writer:
    """Writes one stretch."""

    def __init__(self, edge: Edge, rank: int) -> None:
        self.edge, self.rank = edge, rank
        self.graph = fx.Graph()
        self.x = self._noted(self.graph.placeholder("x"))

    def along(self, steps: Sequence[Step]) -> fx.Graph:
        """Steps on one mesh."""
        value = self.edge.value
        move = Redistributor(self.rank, value, self.edge.reduce, self._emit, self._collect)
        self.graph.output(move.along(self.x, steps, value.shape))
        return self.graph

    def exchange(self, step: SendRecv) -> fx.Graph:
        """The exchange between the meshes: pieces go straight to the ranks that need them."""
        shape, x = self.edge.value.shape, self.x
        # In the order of `ranks` on every rank: entry i of all sizes belongs to member i of the group.
        sends = {rank: list(self._blocks(step, (self.rank, rank), 2)) for rank in self.edge.ranks}
        takes = {rank: list(self._blocks(step, (rank, self.rank), 3)) for rank in self.edge.ranks}
        # A rank that only receives sends what it was given, an empty flat tensor.
        if self.rank in step.src.mesh.ranks:
            x = self._emit(communication.pack, x, [b for blocks in sends.values() for b in blocks])
        sizes = [[num_elements(blocks) for blocks in side.values()] for side in (sends, takes)]
        started = self._emit(communication.all_to_all_start, x, 0, sizes[0], 0, sizes[1], BETWEEN)
        received = sum(sizes[1]) * self.edge.value.itemsize
        # While it is under way both what is sent and what is received exist; the larger is counted.
        held = max(sum(sizes[0]), sum(sizes[1])) * self.edge.value.itemsize
        self._collect(started, "send_recv", BETWEEN, received, self.edge.value.dtype, held)
        x = self._emit(communication.wait, started)
        if self.rank in step.dst.mesh.ranks:
            local = list(step.dst.local_shape(shape, self.rank))
            x = self._emit(communication.unpack, x, [b for blocks in takes.values() for b in blocks], local)
        self.graph.output(x)
        return self.graph

    def _blocks(self, step: SendRecv, ends: tuple[int, int], which: int) -> Iterator[communication.Box]:
        """Blocks from one rank to another, in the sender's piece (2) or the receiver's (3)."""
        for block in step.blocks(self.edge.value.shape):
            if (block.src_rank, block.dst_rank) == ends:
                yield box_of(block[which])  # type: ignore[arg-type]

    def _emit(self, fn: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._noted(self.graph.call_function(fn, args, kwargs))

    def _noted(self, node: fx.Node) -> fx.Node:
        node.meta.update(backward=self.edge.backward, constant=False, module="")
        return node

    def _collect(
        self, node: fx.Node, kind: str, axes: tuple[str, ...], num_bytes: int, dtype: str, held: int
    ) -> None:
        why, name = f"part {self.edge.target} reads it", self.edge.value.name
        node.meta["transfer"] = Transfer(
            kind, axes, num_bytes, name, "", self.edge.backward, why, dtype, held_bytes=held
        )
