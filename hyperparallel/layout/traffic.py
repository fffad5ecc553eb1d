"""How many elements a rank must receive to go from one cut of a tensor to another.

No plan can move less than what a rank's new piece holds beyond its old one, and an exact exchange
moves just that, so this number is both a bound and a price. It is the maximum over ranks of

    |new piece| - |new piece ∩ old piece|,

in closed form where all pieces are equal (the cuts of a dim agree up to a common prefix; if both go
on differently, some rank's pieces do not meet; else the finer cut is the meeting), else over the
whole grid of coordinates at once with numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Dims = tuple[tuple[str, ...], ...]
"""Per tensor dim the axes that cut it, outermost first."""

Numbers = NDArray[np.int64] | int
Cut = tuple[Numbers, Numbers]
"""Start and stop of a piece, for all coordinates at once."""


class Traffic:
    """Prices for one tensor on one mesh; each cut of a dim is worked out once.

    sizes: of the mesh axes; shape: global.
    """

    def __init__(self, sizes: Mapping[str, int], shape: tuple[int, ...]) -> None:
        self.sizes, self.shape = sizes, shape
        self._known: dict[tuple[Dims, Dims], int] = {}
        self._cuts: dict[tuple[int, tuple[str, ...]], Cut] = {}
        self._meets: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Numbers] = {}
        self._index: dict[str, NDArray[np.int64]] = {}

    def largest(self, dims: Sequence[tuple[str, ...]]) -> int:
        """Elements of the largest piece."""
        product = 1
        for length in self.lengths(dims):
            product *= length
        return product

    def lengths(self, dims: Sequence[tuple[str, ...]]) -> list[int]:
        """Shape of the largest piece: every cut rounded up."""
        found = []
        for size, axes in zip(self.shape, dims, strict=True):
            for axis in axes:
                size = -(-size // self.sizes[axis])
            found.append(size)
        return found

    def missing(self, src: Dims, dst: Dims) -> int:
        """Elements that the rank with most to receive lacks."""
        if src == dst:
            return 0
        found = self._known.get((src, dst))
        if found is None:
            found = self._equal_pieces(src, dst)
            found = self._any_pieces(src, dst) if found is None else found
            self._known[src, dst] = found
        return found

    def _equal_pieces(self, src: Dims, dst: Dims) -> int | None:
        """The closed form; None where some dim does not divide."""
        wanted = overlap = 1
        for size, old, new in zip(self.shape, src, dst, strict=True):
            old_cut = new_cut = 1
            for axis in old:
                old_cut *= self.sizes[axis]
            for axis in new:
                new_cut *= self.sizes[axis]
            if size % old_cut or size % new_cut:
                return None
            wanted *= size // new_cut
            overlap *= size // max(old_cut, new_cut) if _compatible(old, new) else 0
        return wanted - overlap

    def _any_pieces(self, src: Dims, dst: Dims) -> int:
        """All coordinates at once: one array axis per mesh axis."""
        wanted: Numbers = 1
        overlap: Numbers = 1
        for dim, (old, new) in enumerate(zip(src, dst, strict=True)):
            length = self._meet(dim, new, new)
            wanted = wanted * length
            overlap = overlap * (length if old == new else self._meet(dim, old, new))
        return int(np.max(wanted - overlap))

    def _meet(self, dim: int, old: tuple[str, ...], new: tuple[str, ...]) -> Numbers:
        """How much of a dim's new piece lies in the old one."""
        found = self._meets.get((dim, old, new))
        if found is None:
            start, stop = self._cut(dim, new)
            if old != new:
                old_start, old_stop = self._cut(dim, old)
                start, stop = np.maximum(start, old_start), np.minimum(stop, old_stop)
            found = np.maximum(stop - start, 0) if old != new else stop - start
            self._meets[dim, old, new] = found
        return found

    def _cut(self, dim: int, axes: tuple[str, ...]) -> Cut:
        """Start and stop of every piece of a dim."""
        if not axes:
            return 0, self.shape[dim]
        found = self._cuts.get((dim, axes))
        if found is None:
            start, stop = self._cut(dim, axes[:-1])
            piece = -((start - stop) // self.sizes[axes[-1]])
            start = np.minimum(start + self._positions(axes[-1]) * piece, stop)
            found = self._cuts[dim, axes] = start, np.minimum(start + piece, stop)
        return found

    def _positions(self, axis: str) -> NDArray[np.int64]:
        found = self._index.get(axis)
        if found is None:
            grid = [size if name == axis else 1 for name, size in self.sizes.items()]
            found = self._index[axis] = np.arange(self.sizes[axis]).reshape(grid)
        return found


def missing(sizes: Mapping[str, int], src: Dims, dst: Dims, shape: tuple[int, ...]) -> int:
    """Elements that the rank with most to receive lacks; sizes are the mesh axes' sizes.

    >>> missing({"tp": 4}, (("tp",), ()), ((), ("tp",)), (8, 8))
    12
    >>> missing({"tp": 4}, (("tp",),), ((),), (5,))
    5
    """
    return Traffic(sizes, shape).missing(src, dst)


def _compatible(old: tuple[str, ...], new: tuple[str, ...]) -> bool:
    """Whether one cut of a dim refines the other; if not, some rank's two pieces do not meet."""
    return old[: len(new)] == new[: len(old)]
