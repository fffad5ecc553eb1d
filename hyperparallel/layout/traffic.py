"""How many elements a rank must receive to go from one cut of a tensor to another.

No plan can move less than what a rank's new piece holds beyond its old one, and an exact exchange moves
just that, so this number is both a bound and a price. It is the maximum over ranks of

    |new piece| - |new piece ∩ old piece|,

in closed form where all pieces are equal (the cuts of a dim agree up to a common prefix; if both go on
differently, some rank's pieces do not meet; else the finer cut is the meeting), else over the whole
grid of coordinates at once with numpy.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Dims = tuple[tuple[str, ...], ...]
"""Per tensor dim the axes that cut it, outermost first."""


def missing(sizes: Mapping[str, int], src: Dims, dst: Dims, shape: tuple[int, ...]) -> int:
    """Elements that the rank with most to receive lacks; sizes are the mesh axes' sizes.

    >>> missing({"tp": 4}, (("tp",), ()), ((), ("tp",)), (8, 8))
    12
    >>> missing({"tp": 4}, (("tp",),), ((),), (5,))
    5
    """
    if src == dst:
        return 0
    wanted = overlap = 1
    for size, old, new in zip(shape, src, dst, strict=True):
        old_cut = new_cut = 1
        for axis in old:
            old_cut *= sizes[axis]
        for axis in new:
            new_cut *= sizes[axis]
        if size % old_cut or size % new_cut:
            return _missing_uneven(sizes, src, dst, shape)
        wanted *= size // new_cut
        overlap *= size // max(old_cut, new_cut)
        if overlap and _conflict(old, new):
            overlap = 0
    return wanted - overlap


def _conflict(old: tuple[str, ...], new: tuple[str, ...]) -> bool:
    """Whether two cuts of a dim both go on, differently, after their common prefix."""
    return old[: len(new)] != new[: len(old)]


def _missing_uneven(sizes: Mapping[str, int], src: Dims, dst: Dims, shape: tuple[int, ...]) -> int:
    used = list(dict.fromkeys(axis for dims in (src, dst) for axes in dims for axis in axes))
    place = {axis: i for i, axis in enumerate(used)}
    index = {}
    for axis, i in place.items():
        grid = [1] * len(used)
        grid[i] = sizes[axis]
        index[axis] = np.arange(sizes[axis]).reshape(grid)
    wanted: NDArray[np.int64] | int = 1
    overlap: NDArray[np.int64] | int = 1
    for size, old, new in zip(shape, src, dst, strict=True):
        start, stop = _borders(size, new, sizes, index)
        wanted = wanted * (stop - start)
        if old == new:
            overlap = overlap * (stop - start)
            continue
        old_start, old_stop = _borders(size, old, sizes, index)
        both = np.minimum(stop, old_stop) - np.maximum(start, old_start)
        overlap = overlap * np.maximum(both, 0)
    return int(np.max(wanted - overlap))


def _borders(
    size: int, axes: tuple[str, ...], sizes: Mapping[str, int], index: Mapping[str, NDArray[np.int64]]
) -> tuple[NDArray[np.int64] | int, NDArray[np.int64] | int]:
    start: NDArray[np.int64] | int = 0
    stop: NDArray[np.int64] | int = size
    for axis in axes:
        piece = -((start - stop) // sizes[axis])
        start = np.minimum(start + index[axis] * piece, stop)
        stop = np.minimum(start + piece, stop)
    return start, stop
