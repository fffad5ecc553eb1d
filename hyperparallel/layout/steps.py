"""Steps from one layout to another, each one collective or one local change.

Every step names the axes of its groups (outermost first), the layouts before and after it, and says
how many bytes one rank receives (the maximum over ranks). With n ranks in a group and pieces that
divide:

    Slice, Pend, Move   0                     AllGather       (n-1)/n of the piece after it
    AllReduce           2(n-1)/n of a piece   ReduceScatter   (n-1)/n of the piece before it
    AllToAll            (n-1)/n of a piece    Permute, SendRecv   what a rank needs and has not got

Uneven and empty pieces are counted exactly, by the rank that receives most. What the collectives do
to arrays is `emulate.py`; who sends what in the last two is `exchange.py`; choosing steps is
`reshard.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyperparallel.layout.exchange import MovedBlock, most_received, moved_blocks
from hyperparallel.layout.layout import Layout
from hyperparallel.layout.traffic import received_elements


@dataclass(frozen=True)
class Step:
    """One change of layout; see the subclasses.

    axes: the mesh axes along which the members of one group differ, outermost first; src, dst: the
    layouts before and after.
    """

    axes: tuple[str, ...]
    src: Layout
    dst: Layout

    @property
    def group_size(self) -> int:
        """Ranks in one group of this step."""
        return math.prod(self.src.mesh.axis_size(axis) for axis in self.axes)

    def num_elements(self, shape: Sequence[int]) -> int:
        """Elements of a tensor of global `shape` that one rank receives; the most of any."""
        mesh = self.src.mesh
        return received_elements(mesh._sizes, self.src.dims, self.dst.dims, tuple(shape))

    def num_bytes(self, shape: Sequence[int], itemsize: int = 4) -> int:
        """Bytes that one rank receives; the most of any rank.

        >>> from hyperparallel.layout import Mesh
        >>> mesh = Mesh((4,), ("tp",))
        >>> AllGather(("tp",), mesh("tp"), mesh(None), 0).num_bytes((16,), 4)
        48
        """
        return self.num_elements(shape) * itemsize

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in _COMMON)
        over = ", ".join(self.axes)
        return f"{type(self).__name__}({named}) over ({over}): {_short(self)}"


_COMMON = ("axes", "src", "dst")


@dataclass(frozen=True)
class Slice(Step):
    """Each rank keeps its piece of what it holds: `axes` cut `dim`, inside the cuts it has."""

    dim: int


@dataclass(frozen=True)
class AllGather(Step):
    """The innermost cuts of `dim`, by `axes`, are undone: pieces joined in group order."""

    dim: int


@dataclass(frozen=True)
class ReduceScatter(Step):
    """The pending `op` over `axes` is done and each rank keeps its piece of `dim`."""

    dim: int
    op: str

    def num_elements(self, shape: Sequence[int]) -> int:
        """(n - 1) other members' shares of the piece a rank keeps."""
        return (self.group_size - 1) * math.prod(self.dst.largest_shape(shape))


@dataclass(frozen=True)
class AllReduce(Step):
    """The pending `op` over `axes` is done on every rank."""

    op: str

    def num_elements(self, shape: Sequence[int]) -> int:
        """2 (n - 1) / n of the piece: a reduce-scatter, then a gather."""
        n = self.group_size
        return 2 * (n - 1) * -(-math.prod(self.dst.largest_shape(shape)) // n)


@dataclass(frozen=True)
class AllToAll(Step):
    """The innermost cuts of `from_dim`, by `axes`, become the innermost cuts of `to_dim`."""

    from_dim: int
    to_dim: int


@dataclass(frozen=True)
class Permute(Step):
    """Every rank fetches just what it needs and has not got, from ranks that differ along `axes`.

    Covers order changes on one dim, exchanges of axes between dims, and every cut that no single
    collective can make without moving more bytes.
    """

    def blocks(self, shape: Sequence[int]) -> tuple[MovedBlock, ...]:
        """Who sends which part of its piece to whom; from a rank to itself: a local copy."""
        return moved_blocks(self.src, self.dst, shape)


@dataclass(frozen=True)
class Pend(Step):
    """A value becomes pending over `axes`: kept on index 0, elsewhere the neutral element."""

    op: str

    def num_elements(self, shape: Sequence[int]) -> int:  # noqa: ARG002 -- as every step's
        """Nothing moves."""
        return 0


@dataclass(frozen=True)
class Move(Step):
    """Each rank moves its piece to another memory tier; between ranks nothing moves."""

    def num_elements(self, shape: Sequence[int]) -> int:  # noqa: ARG002 -- as every step's
        """Nothing moves between ranks."""
        return 0


@dataclass(frozen=True)
class SendRecv(Step):
    """The tensor goes from the ranks of one mesh to those of another; `axes` is empty."""

    def blocks(self, shape: Sequence[int]) -> tuple[MovedBlock, ...]:
        """Who sends which part of its piece to whom; from a rank to itself: a local copy."""
        return moved_blocks(self.src, self.dst, shape)

    def num_elements(self, shape: Sequence[int]) -> int:
        """Elements that the busiest receiver gets from other ranks."""
        return most_received(self.blocks(shape))


def _short(step: Step) -> str:
    src, dst = (str(layout)[len(repr(layout.mesh)) :] for layout in (step.src, step.dst))
    if step.src.mesh != step.dst.mesh:
        return f"{step.src} -> {step.dst}"
    return f"{src} -> {dst}"
