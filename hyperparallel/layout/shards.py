"""Which elements a rank holds: global indices of a layout's pieces, and back.

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
from hyperparallel.layout.layout import Layout


def check_shape(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple; LayoutError if the layout is for another number of dims."""
    shape = tuple(shape)
    if len(shape) != len(layout.dims):
        allowed = f"one entry per dim of the tensor, whose shape is {shape}"
        dims = ", ".join(["None"] * len(shape))
        raise LayoutError("tensor_map", layout.dims, allowed, f"{len(shape)} entries ({dims}, say)")
    return shape


def intervals(layout: Layout, shape: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    """Per dim the (start, stop) of the piece that a rank holds."""
    shape = check_shape(layout, shape)
    if not any(layout.dims):
        layout.mesh.indices(rank)
        return tuple((0, size) for size in shape)
    mesh = layout.mesh
    indices = mesh.indices(rank)
    found = []
    for size, axes in zip(shape, layout.dims, strict=True):
        start, stop = 0, size
        for axis in axes:
            place = mesh._places[axis]
            piece = -((start - stop) // mesh.shape[place])
            start = min(start + indices[place] * piece, stop)
            stop = min(start + piece, stop)
        found.append((start, stop))
    return tuple(found)


def slices(layout: Layout, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
    """The part of the tensor that a rank holds, as one slice per dim."""
    return tuple(slice(start, stop) for start, stop in intervals(layout, shape, rank))


def largest_shape(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the largest piece: every cut rounded up."""
    found = []
    sizes = layout.mesh._sizes
    for size, axes in zip(check_shape(layout, shape), layout.dims, strict=True):
        for axis in axes:
            size = -(-size // sizes[axis])
        found.append(size)
    return tuple(found)


def is_even(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether all pieces have the same shape.

    >>> from hyperparallel.layout import Mesh
    >>> is_even(Mesh((2,), ("dp",))("dp"), (4,)), is_even(Mesh((2,), ("dp",))("dp"), (5,))
    (True, False)
    """
    sizes = layout.mesh._sizes
    cuts = (math.prod(sizes[axis] for axis in axes) for axes in layout.dims)
    return all(size % cut == 0 for size, cut in zip(check_shape(layout, shape), cuts, strict=True))


def global_index(
    layout: Layout, shape: Sequence[int], rank: int, local_index: Sequence[int]
) -> tuple[int, ...]:
    """The place in the whole tensor of an element of a rank's piece."""
    spans = intervals(layout, shape, rank)
    local = tuple(stop - start for start, stop in spans)
    if len(local_index) != len(local) or any(
        not 0 <= i < size for i, size in zip(local_index, local, strict=True)
    ):
        raise LayoutError("local_index", tuple(local_index), f"an index into {local} on rank {rank}")
    return tuple(start + i for (start, _), i in zip(spans, local_index, strict=True))


def local_index(
    layout: Layout, shape: Sequence[int], rank: int, index: Sequence[int]
) -> tuple[int, ...] | None:
    """The place of a global element in a rank's piece, or None."""
    _check_global(shape, index)
    spans = intervals(layout, shape, rank)
    if all(start <= i < stop for i, (start, stop) in zip(index, spans, strict=True)):
        return tuple(i - start for i, (start, _) in zip(index, spans, strict=True))
    return None


def owners(
    layout: Layout, shape: Sequence[int], index: Sequence[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """All (rank, local index) that hold a global element, in rank list order."""
    _check_global(shape, index)
    mesh = layout.mesh
    fixed: dict[str, int] = {}
    local = []
    for size, axes, i in zip(check_shape(layout, shape), layout.dims, index, strict=True):
        start, stop = 0, size
        for axis in axes:
            piece = -((start - stop) // mesh._sizes[axis])
            fixed[axis] = (i - start) // piece
            start = start + fixed[axis] * piece
            stop = min(start + piece, stop)
        local.append(i - start)
    choices = [
        [fixed[name]] if name in fixed else range(size)
        for name, size in zip(mesh.names, mesh.shape, strict=True)
    ]
    strides = mesh._strides
    found = []
    for choice in itertools.product(*choices):
        position = sum(i * stride for i, stride in zip(choice, strides, strict=True))
        found.append((mesh.ranks[position], tuple(local)))
    return tuple(found)


def _check_global(shape: Sequence[int], index: Sequence[int]) -> None:
    if len(index) != len(shape) or any(not 0 <= i < size for i, size in zip(index, shape, strict=True)):
        raise LayoutError("global_index", tuple(index), f"an index into {tuple(shape)}")
