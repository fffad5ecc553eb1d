"""How many elements a rank must receive to go from one cut of a tensor to another.

No plan can move less than what a rank's new piece holds beyond its old one, and an exact exchange
moves just that, so this number is both a bound and a price. It is the maximum over ranks of

    |new piece| - |new piece ∩ old piece|,

in closed form where all pieces are equal (the cuts of a dim agree up to a common prefix; if both go
on differently, some rank's pieces do not meet; else the finer cut is the meeting) or no axis moves
from one dim to another, else over the whole grid of coordinates at once with numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hyperparallel.layout.entries import Dims

Numbers = NDArray[np.int64] | int
CutCounts = tuple[Numbers, Numbers]
"""Start and stop of a piece, for all coordinates at once."""


class Traffic:
    """Prices for one tensor on one mesh; each cut of a dim is worked out once.

    sizes: of the mesh axes; shape: global.
    """

    def __init__(self, sizes: Mapping[str, int], shape: tuple[int, ...]) -> None:
        self.sizes, self.shape = sizes, shape
        self._known: dict[tuple[Dims, Dims], int] = {}
        self._cuts: dict[tuple[int, tuple[str, ...]], CutCounts] = {}
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
        found, sizes = [], self.sizes
        for size, axes in zip(self.shape, dims, strict=True):
            for axis in axes:
                size = -(-size // sizes[axis])
            found.append(size)
        return found

    def missing(self, src: Dims, dst: Dims) -> int:
        """Elements that the rank with most to receive lacks."""
        if src == dst:
            return 0
        found = self._known.get((src, dst))
        if found is None:
            found = self._equal_pieces(src, dst)
            found = self._apart(src, dst) if found is None else found
            found = self._any_pieces(src, dst) if found is None else found
            self._known[src, dst] = found
        return found

    def at_least(self, src: Dims, piece: Sequence[int]) -> int:
        """A lower bound of `missing`, for a target whose largest piece has this shape.

        It is what the rank with all indices zero lacks.
        """
        wanted = overlap = 1
        for have, want in zip(self.lengths(src), piece, strict=True):
            wanted *= want
            overlap *= have if have < want else want
        return wanted - overlap

    def _equal_pieces(self, src: Dims, dst: Dims) -> int | None:
        """The closed form; None where some dim does not divide."""
        wanted = overlap = 1
        for size, old, new in zip(self.shape, src, dst, strict=True):
            old_cut = new_cut = 1
            for axis in old:
                old_cut *= self.sizes[axis]
            for axis in new:
                new_cut *= self.sizes[axis]
            # A rounded-up piece is no longer size / cut.
            if size % old_cut or size % new_cut:
                return None
            wanted *= size // new_cut
            # Of two cuts of which one refines the other the finer piece lies inside the coarser; else some
            # rank's do not meet.
            overlap *= size // max(old_cut, new_cut) if _compatible(old, new) else 0
        return wanted - overlap

    def _apart(self, src: Dims, dst: Dims) -> int | None:
        """The closed form for uneven pieces; None where only looking at all ranks tells.

        If no axis leaves a place for another, a rank may stand first on the axes that cut the new piece, so
        that it is largest, and on the old axes wherever the overlap is least. Where a dim is cut by other
        axes than before it is nothing; often so, too, where the axis that went cuts another dim now.
        """
        before, after = ({axis for axes in dims for axis in axes} for dims in (src, dst))
        wanted = overlap = 1
        moved, moves, apart = "", False, False
        for size, old, new in zip(self.shape, src, dst, strict=True):
            same = _common(old, new)
            whole = self._first(size, new[:same])
            length = self._first(whole, new[same:])
            wanted *= length
            gone, come = old[same:], new[same:]
            if gone and come:
                # Nothing asks where this axis stands now: its last piece and the first new one do not meet.
                apart |= gone[0] not in after
                moved = gone[0]
            elif gone:
                # Free to stand anywhere on the axes that went: the least overlap counts, down to an empty old
                # piece.
                overlap *= min(self._lengths_of(whole, gone))
            else:
                overlap *= length
            moves = moves or not (after.isdisjoint(gone) and before.isdisjoint(come))
        if apart:
            return wanted
        if not moves:
            return wanted - overlap
        # Two ranks that most often lack everything: if one does, no rank lacks more, and the grid need not be
        # looked at.
        for index in {1, self.sizes[moved] - 1} if moved else ():
            if self._received(src, dst, {moved: index}) == wanted:
                return wanted
        return None

    def _first(self, size: int, axes: tuple[str, ...]) -> int:
        """Length of the first piece, which is the largest."""
        for axis in axes:
            size = -(-size // self.sizes[axis])
        return size

    def _lengths_of(self, size: int, axes: tuple[str, ...]) -> set[int]:
        """The lengths that pieces have; of a cut in equal ones at most three: full, the rest, none."""
        found = {size}
        for axis in axes:
            count = self.sizes[axis]
            cut = [(length, -(-length // count)) for length in found]
            found = {piece for _, piece in cut}
            for length, piece in cut:
                # Full pieces, then at most one rest, then empty ones.
                full = length // piece if piece else 0
                found |= {length - full * piece} if full < count else set()
                found |= {0} if full + 1 < count else set()
        return found

    def _received(self, src: Dims, dst: Dims, at: Mapping[str, int]) -> int:
        """What one rank lacks; indices that `at` does not name are zero."""
        wanted = overlap = 1
        for size, old, new in zip(self.shape, src, dst, strict=True):
            start, stop = self._piece(size, new, at)
            low, high = self._piece(size, old, at)
            wanted *= stop - start
            overlap *= max(min(stop, high) - max(start, low), 0)
        return wanted - overlap

    def _piece(self, size: int, axes: tuple[str, ...], at: Mapping[str, int]) -> tuple[int, int]:
        start, stop = 0, size
        for axis in axes:
            piece = -((start - stop) // self.sizes[axis])
            start = min(start + at.get(axis, 0) * piece, stop)
            stop = min(start + piece, stop)
        return start, stop

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

    def _cut(self, dim: int, axes: tuple[str, ...]) -> CutCounts:
        """Start and stop of every piece of a dim."""
        if not axes:
            return 0, self.shape[dim]
        found = self._cuts.get((dim, axes))
        if found is None:
            start, stop = self._cut(dim, axes[:-1])
            piece = -((start - stop) // self.sizes[axes[-1]])
            start = np.minimum(start + self._positions(axes[-1]) * piece, stop)
            # Nested cuts share their outer part, which recursion finds in the table.
            found = self._cuts[dim, axes] = start, np.minimum(start + piece, stop)
        return found

    def _positions(self, axis: str) -> NDArray[np.int64]:
        found = self._index.get(axis)
        if found is None:
            # One array axis for each mesh axis: numpy's broadcasting then visits every coordinate.
            grid = [size if name == axis else 1 for name, size in self.sizes.items()]
            found = self._index[axis] = np.arange(self.sizes[axis]).reshape(grid)
        return found


def received_elements(sizes: Mapping[str, int], src: Dims, dst: Dims, shape: tuple[int, ...]) -> int:
    """Elements that the rank with most to receive lacks; sizes are the mesh axes' sizes.

    >>> received_elements({"tp": 4}, (("tp",), ()), ((), ("tp",)), (8, 8))
    12
    >>> received_elements({"tp": 4}, (("tp",),), ((),), (5,))
    5
    """
    return Traffic(sizes, shape).missing(src, dst)


def _common(old: tuple[str, ...], new: tuple[str, ...]) -> int:
    """How many axes two cuts begin with alike."""
    same = 0
    for mine, theirs in zip(old, new, strict=False):
        if mine != theirs:
            break
        same += 1
    return same


def _compatible(old: tuple[str, ...], new: tuple[str, ...]) -> bool:
    """Whether one cut of a dim refines the other; if not, some rank's two pieces do not meet."""
    return old[: len(new)] == new[: len(old)]
