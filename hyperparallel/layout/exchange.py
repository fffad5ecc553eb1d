"""Exact exchange: which part of whose piece goes to whom, when a tensor changes its cut or its
mesh.

Each receiver's new piece is met with the old pieces, per dim and then as a product; of the ranks
that hold the same old piece, the one standing like the receiver on the other axes sends (so the
load is even and pending summands are never mixed), across meshes the holders take turns, and what a
rank already holds comes from itself.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hyperparallel.errors import LayoutError
from hyperparallel.layout.grid import Grid
from hyperparallel.layout.layout import Layout
from hyperparallel.layout.shards import check_shape, intervals


class MovedBlock(NamedTuple):
    """One block: `src_slices` of the sender's piece become `dst_slices` of the receiver's."""

    src_rank: int
    dst_rank: int
    src_slices: tuple[slice, ...]
    dst_slices: tuple[slice, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the block."""
        return math.prod(part.stop - part.start for part in self.src_slices)


DimCut = tuple[dict[str, int], int, int]
"""One piece of one dim: its index along each axis, start, stop."""


def moved_blocks(src: Layout, dst: Layout, shape: Sequence[int]) -> tuple[MovedBlock, ...]:
    """All blocks that make the pieces of `dst` from those of `src`; they tile each piece of `dst`.

    Empty blocks are left out. Axes pending in `src` must be pending in `dst`, on the same mesh: a block is
    one rank's summand. Raises LayoutError for a sum that would be lost.

    >>> from hyperparallel.layout import Mesh
    >>> two = Mesh((2,), ("dp",))
    >>> [block[:2] for block in moved_blocks(two("dp"), Mesh((1,), ("x",), (7,))(None), (4,))]
    [(0, 7), (1, 7)]
    """
    shape = check_shape(src.dims, check_shape(dst.dims, shape))
    if src.partial and (src.mesh, src.partial) != (dst.mesh, dst.partial):
        allowed = f"pending in {dst} too, on one mesh: an exchange adds nothing up"
        raise LayoutError("partial", dict(src.partial), allowed, "an AllReduce or ReduceScatter before it")
    old = [_cuts(size, axes, src.mesh) for size, axes in zip(shape, src.dims, strict=True)]
    blocks = []
    for turn, rank in enumerate(dst.mesh.ranks):
        # Per dim first: pieces are boxes, so that what meets in every dim meets.
        wanted = intervals(dst.mesh, dst.dims, shape, rank)
        start_at = _like_receiver(src, rank, turn)
        meets = [
            [cut for cut in cuts if cut[1] < stop and start < cut[2]]
            for cuts, (start, stop) in zip(old, wanted, strict=True)
        ]
        for choice in itertools.product(*meets):
            blocks.append(_block(src, rank, wanted, choice, start_at))
    return tuple(blocks)


def most_received(blocks: Sequence[MovedBlock]) -> int:
    """Elements that the busiest receiver gets from other ranks."""
    received: Counter[int] = Counter()
    for block in blocks:
        if block.src_rank != block.dst_rank:
            received[block.dst_rank] += block.num_elements
    return max(received.values(), default=0)


def most_sent(blocks: Sequence[MovedBlock]) -> int:
    """Elements that the busiest sender gives to other ranks."""
    sent: Counter[int] = Counter()
    for block in blocks:
        if block.src_rank != block.dst_rank:
            sent[block.src_rank] += block.num_elements
    return max(sent.values(), default=0)


def _cuts(size: int, axes: tuple[str, ...], grid: Grid) -> list[DimCut]:
    cuts: list[DimCut] = [({}, 0, size)]
    for axis in axes:
        count = grid.axis_size(axis)
        finer = []
        for at, start, stop in cuts:
            piece = -((start - stop) // count)
            for index in range(count):
                low = min(start + index * piece, stop)
                finer.append(({**at, axis: index}, low, min(low + piece, stop)))
        cuts = finer
    # Empty pieces meet nothing.
    return [cut for cut in cuts if cut[1] < cut[2]]


def _like_receiver(src: Layout, rank: int, turn: int) -> Mapping[str, int]:
    """Coordinates in the source mesh for the axes that do not cut the tensor there."""
    # A rank of both meshes takes what it can from itself.
    if rank in src.mesh._indices:
        return src.mesh.coordinate(rank)
    # The digits of a receiver's turn: neighbours in turn ask different holders of the same piece.
    at = dict.fromkeys(src.mesh.names, 0)
    for axis in src.free_axes:
        turn, at[axis] = divmod(turn, src.mesh.axis_size(axis))
    return at


def _block(
    src: Layout,
    rank: int,
    wanted: Sequence[tuple[int, int]],
    choice: Sequence[DimCut],
    start_at: Mapping[str, int],
) -> MovedBlock:
    at = dict(start_at)
    src_slices, dst_slices = [], []
    for (start, stop), (where, low, high) in zip(wanted, choice, strict=True):
        # On the axes that cut the source, the sender is who holds the piece; on others it stands as chosen
        # before.
        at.update(where)
        first, last = max(start, low), min(stop, high)
        src_slices.append(slice(first - low, last - low))
        dst_slices.append(slice(first - start, last - start))
    return MovedBlock(src.mesh.rank_at(**at), rank, tuple(src_slices), tuple(dst_slices))
