"""Which elements a rank holds: global indices of a cut tensor's pieces, and back.

A cut is `dims`, per tensor dim the axes of a grid that cut it, outermost first; `Layout` has these
functions as methods.

One cut of the interval [0, n) in k pieces has borders min(i * ceil(n / k), n), as `torch.chunk`
has; a dim cut by several axes is cut again and again inside the piece. Pieces of one layout
therefore tile the tensor exactly, whatever divides whatever, and empty pieces lie at the end of the
piece they came from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hyperparallel.errors import LayoutError
from hyperparallel.layout.entries import Dims
from hyperparallel.layout.grid import Grid


def check_shape(dims: Dims, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple; LayoutError if the cut is of another number of dims."""
    shape = tuple(shape)
    if len(shape) != len(dims):
        allowed = f"one entry per dim of the tensor, whose shape is {shape}"
        instead = ", ".join(["None"] * len(shape))
        raise LayoutError("tensor_map", dims, allowed, f"{len(shape)} entries ({instead}, say)")
    return shape


def intervals(grid: Grid, dims: Dims, shape: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    """Per dim the (start, stop) of the piece that a rank holds."""
    shape = check_shape(dims, shape)
    indices = grid.indices(rank)
    if not any(dims):
        return tuple((0, size) for size in shape)
    found = []
    for size, axes in zip(shape, dims, strict=True):
        start, stop = 0, size
        for axis in axes:
            place = grid._places[axis]
            # Rounded up, in integers: floats would be wrong past 2^53 elements.
            piece = -((start - stop) // grid.shape[place])
            # Both borders are kept inside, so that pieces past the end are empty and lie at it.
            start = min(start + indices[place] * piece, stop)
            stop = min(start + piece, stop)
        found.append((start, stop))
    return tuple(found)


def slices(grid: Grid, dims: Dims, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
    """The part of the tensor that a rank holds, as one slice per dim."""
    return tuple(slice(start, stop) for start, stop in intervals(grid, dims, shape, rank))


def largest_shape(grid: Grid, dims: Dims, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the largest piece: every cut rounded up."""
    found = []
    sizes = grid._sizes
    for size, axes in zip(check_shape(dims, shape), dims, strict=True):
        for axis in axes:
            size = -(-size // sizes[axis])
        found.append(size)
    return tuple(found)


def divides_evenly(grid: Grid, dims: Dims, shape: Sequence[int]) -> bool:
    """Whether every cut divides what it cuts.

    >>> two = Grid((2,), ("dp",))
    >>> divides_evenly(two, (("dp",),), (4,)), divides_evenly(two, (("dp",),), (5,))
    (True, False)
    """
    sizes = grid._sizes
    cuts = (math.prod(sizes[axis] for axis in axes) for axes in dims)
    return all(size % cut == 0 for size, cut in zip(check_shape(dims, shape), cuts, strict=True))


def global_index(
    grid: Grid, dims: Dims, shape: Sequence[int], rank: int, local_index: Sequence[int]
) -> tuple[int, ...]:
    """The place in the whole tensor of an element of a rank's piece."""
    spans = intervals(grid, dims, shape, rank)
    local = tuple(stop - start for start, stop in spans)
    if len(local_index) != len(local) or any(
        not 0 <= i < size for i, size in zip(local_index, local, strict=True)
    ):
        raise LayoutError("local_index", tuple(local_index), f"an index into {local} on rank {rank}")
    return tuple(start + i for (start, _), i in zip(spans, local_index, strict=True))


def local_index(
    grid: Grid, dims: Dims, shape: Sequence[int], rank: int, index: Sequence[int]
) -> tuple[int, ...] | None:
    """The place of a global element in a rank's piece, or None."""
    _check_global(shape, index)
    spans = intervals(grid, dims, shape, rank)
    if all(start <= i < stop for i, (start, stop) in zip(index, spans, strict=True)):
        return tuple(i - start for i, (start, _) in zip(index, spans, strict=True))
    return None


def owners(
    grid: Grid, dims: Dims, shape: Sequence[int], index: Sequence[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """All (rank, local index) that hold a global element, in rank list order."""
    _check_global(shape, index)
    fixed: dict[str, int] = {}
    local = []
    for size, axes, i in zip(check_shape(dims, shape), dims, index, strict=True):
        start, stop = 0, size
        for axis in axes:
            piece = -((start - stop) // grid._sizes[axis])
            # The cut read backwards: which piece an element falls in says the owners' index on that axis.
            fixed[axis] = (i - start) // piece
            start = start + fixed[axis] * piece
            stop = min(start + piece, stop)
        local.append(i - start)
    choices = [
        [fixed[name]] if name in fixed else range(size)
        for name, size in zip(grid.names, grid.shape, strict=True)
    ]
    strides = grid._strides
    found = []
    for choice in itertools.product(*choices):
        position = sum(i * stride for i, stride in zip(choice, strides, strict=True))
        found.append((grid.ranks[position], tuple(local)))
    return tuple(found)


def _check_global(shape: Sequence[int], index: Sequence[int]) -> None:
    if len(index) != len(shape) or any(not 0 <= i < size for i, size in zip(index, shape, strict=True)):
        raise LayoutError("global_index", tuple(index), f"an index into {tuple(shape)}")
