"""All ranks of a region in this process on real tensors: what the region means without a plan.

Every rank is a thread on its own piece; collectives are plain arithmetic on what the members hold
(`CollectiveKind.compute`), so autograd differentiates the whole and shares nothing with the gradients that a
sharded program uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperparallel.errors import UserError
from hyperparallel.graph.collective_table import collective, reduce_in_order
from hyperparallel.graph.region.layouts import joined_shape
from hyperparallel.graph.region.rehearsal import Body
from hyperparallel.graph.region.seat import Meeting, MetSeat, meet
from hyperparallel.layout import Layout, Mesh


@dataclass
class _Real(MetSeat):
    def run(self, name: str, x: Tensor, axes: tuple[str, ...], *args: Any) -> Tensor:
        calls = self.meet((name, axes), axes, (x, *args))
        index = self.index(axes)
        made = collective(name).compute(calls) if index == 0 else []  # the first does it for all
        results: list[Tensor] = self.meet((name, axes), axes, made)[0]
        return results[index]


def emulate_region(
    name: str, body: Body, mesh: Mesh, tensors: Sequence[Tensor],
    in_layouts: Sequence[Layout], resolve_outs: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The whole results of `body` as run by all ranks on pieces of whole `tensors`.

    resolve_outs: from the numbers of dims of the results to their layouts. Raises `UserError` for results
    that do not fit these, or that differ between ranks where they should not.
    """
    # Ranks that draw would each move the one state that they share here.
    drawn = torch.get_rng_state()

    def perform(rank: int) -> tuple[Tensor, ...]:
        pairs_of = zip(tensors, in_layouts, strict=True)
        return body(*(x[layout.slices(x.shape, rank)].contiguous() for x, layout in pairs_of))

    def made(rank: int, meeting: Meeting) -> MetSeat:
        return _Real(name, mesh, rank, meeting)

    rows = dict(zip(mesh.ranks, meet(mesh, made, perform), strict=True))
    if not torch.equal(drawn, torch.get_rng_state()):
        raise UserError(
            f"random numbers in {name}", "drawn inside the region", "code without random numbers",
            "a random tensor made outside the region and passed to it",
        )  # fmt: skip
    layouts = resolve_outs([x.dim() for x in rows[mesh.ranks[0]]])
    return tuple(
        _joined(layout, {rank: row[i] for rank, row in rows.items()}, f"result {i} of {name}")
        for i, layout in enumerate(layouts)
    )


def _joined(layout: Layout, local: dict[int, Tensor], what: str) -> Tensor:
    """The whole tensor from every rank's piece; copies must agree, pending pieces are reduced."""
    mesh = layout.mesh
    shape = joined_shape(layout, {rank: tuple(x.shape) for rank, x in local.items()}, what)
    for axis, how in reversed(layout.partial):
        before = local
        local = {r: reduce_in_order([before[m] for m in mesh.group(r, axis)], how) for r in mesh.ranks}
    seen: dict[tuple[tuple[int, int], ...], Tensor] = {}
    whole = local[mesh.ranks[0]].new_zeros(shape)
    for rank, piece in local.items():
        at = layout.slices(shape, rank)
        key = tuple((part.start, part.stop) for part in at)
        # Every piece is held by as many ranks as there are copies; one is taken, the others are compared.
        if key not in seen:
            seen[key] = whole[at] = piece
        elif not _close(piece, seen[key]):
            given = f"another value on rank {rank} than on an earlier one"
            raise UserError(what, given, f"one value wherever {layout} is replicated")
    return whole


def _close(one: Tensor, two: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, two))
    rough = torch.finfo(one.dtype).eps ** 0.5
    return bool(torch.allclose(one, two, rtol=rough, atol=rough, equal_nan=True))
