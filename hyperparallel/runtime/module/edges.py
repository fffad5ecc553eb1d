"""An edge between two parts, run by the ranks of both meshes: local pieces in, local pieces out.

Every edge has a group of its own, a channel of the ranks of both meshes, so its messages never wait for
those of the parts or of other edges. Values cross in the order of calls, which must be the same on all
ranks of the edge; different edges need no common order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyperparallel.graph.edge import BETWEEN, Edge, EdgeLeg, legs_of
from hyperparallel.runtime.comm.group import Bind
from hyperparallel.runtime.comm.groups import Groups
from hyperparallel.runtime.exec.codegen import WaitClock, compile_nodes
from hyperparallel.runtime.exec.compiled import below_autograd


class EdgeProgram:
    """What one rank of an edge does; all ranks of the edge must make one together."""

    def __init__(self, edge: Edge, rank: int, device: torch.device, groups: Groups) -> None:
        self.edge, self.rank, self.device = edge, rank, device
        self.sends = rank in edge.src.mesh.ranks
        self.receives = rank in edge.dst.mesh.ranks
        self.clock = WaitClock()
        self._channel = f"{edge.name} {edge.source} to {edge.target}"
        self._calls = [self._compiled(stretch, groups) for stretch in legs_of(edge, rank)]

    def __call__(self, piece: Tensor | None = None) -> Tensor | None:
        """Take this rank's piece of the value across; the piece it has there, None where it has none.

        piece: what `source` made, None on ranks that are not in its mesh.
        """
        x = piece
        if x is None:
            assert not self.sends, f"rank {self.rank} has a piece of {self.edge.name}"
            # A rank that only receives takes part in the collective too, and gives nothing.
            x = torch.empty(0, dtype=getattr(torch, self.edge.value.dtype), device=self.device)
        with torch.no_grad(), below_autograd():
            for call in self._calls:
                (x,) = call(x)
        return x if self.receives else None

    def _compiled(self, stretch: EdgeLeg, groups: Groups) -> Callable[[Tensor], tuple[Any, ...]]:
        (x,) = stretch.graph.find_nodes(op="placeholder")
        bind = self._binder(stretch, groups)
        return compile_nodes(stretch.nodes, [x], [stretch.result], bind, "edge", self.clock)

    def _binder(self, stretch: EdgeLeg, groups: Groups) -> Bind:
        mesh, ranks = stretch.mesh, self.edge.ranks
        if mesh is None:
            groups.ensure([ranks], self._channel)
            return lambda axes: groups.get(ranks, self._channel) if axes == BETWEEN else None
        groups.ensure([mesh.group(self.rank, transfer.axes) for transfer in stretch.transfers()])
        return lambda axes: groups.get(mesh.group(self.rank, axes))
