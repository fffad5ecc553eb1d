"""How one tensor lies over the mesh while its program is being partitioned.

A `Layout` cuts whole dims. Inside a program a dim may be merged from several factors of which an inner
one is cut (a [batch, seq] -> [batch * seq] view under a cut sequence), so a `Spec` lists, per dim, its
factors outermost first, each with its size and the axes that cut it. Specs are canonical: adjacent
factors that together form one plain cut are merged, so equal meaning is an equal value.

Example: dim of 32 = 2 x 16 with the inner factor cut by tp is `((2, ()), (16, ("tp",)))`; cut on the
outer factor it is `((32, ("tp",)),)`, the plain cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyperparallel.layout import Layout, Mesh
from hyperparallel.layout.entries import DEVICE
from hyperparallel.shard.rules.rule import FactorDims

Factor = tuple[int, tuple[str, ...]]


@dataclass(frozen=True)
class FactorCut:
    """Who cuts a factor, outermost first.

    axes cut the factor in multiples of `unit`; inner axes cut every `period` of it (0: none do).
    """

    axes: tuple[str, ...]
    unit: int = 1
    inner: tuple[str, ...] = ()
    period: int = 0

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Every axis that cuts the factor."""
        return self.axes + self.inner

    def parts(self, size: int) -> list[Factor]:
        """The factor of `size` as finer ones, each cut plainly or not at all.

        >>> FactorCut(("dp",), inner=("tp",), period=8).parts(16)
        [(2, ('dp',)), (1, ()), (8, ('tp',))]
        """
        if not self.period:
            return [(size // self.unit, self.axes), (self.unit, ())]
        # Outer axes cut between periods, never through one: inner axes cut each of them.
        unit = self.unit if self.unit % self.period == 0 else self.period
        return [(size // unit, self.axes), (unit // self.period, ()), (self.period, self.inner)]

    def piece(self, size: int, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int]:
        """(offset, elements) that coordinate `at` holds; with inner cuts the first of them."""
        offset, count = 0, 1
        for part, axes in self.parts(size):
            start, length = piece(part, axes, mesh, at)
            offset, count = offset * part + start, count * length
        return offset, count


@dataclass(frozen=True)
class Spec:
    """dims: per tensor dim its (size, axes) factors; partial: (axis, op) pairs in mesh order; tier: the
    memory that the pieces lie in."""

    mesh: Mesh
    dims: tuple[tuple[Factor, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    tier: str = DEVICE

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(size for size, _ in factors) for factors in self.dims)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape that `rank` holds."""
        at = self.mesh.coordinate(rank)
        return tuple(
            math.prod(piece(size, axes, self.mesh, at)[1] for size, axes in factors)
            for factors in self.dims
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut some dim."""
        return tuple(axis for factors in self.dims for _, axes in factors for axis in axes)

    def is_whole(self) -> bool:
        """Whether every rank holds everything."""
        return not self.axes and not self.partial

    def layout(self) -> Layout:
        """The same as a plain `Layout`; inner cuts are shown on the dim they fall in."""
        dims = [tuple(axis for _, axes in factors for axis in axes) for factors in self.dims]
        return self.mesh(*dims, partial=dict(self.partial), tier=self.tier)


def make_spec(
    mesh: Mesh,
    dims: Sequence[Sequence[Factor]],
    partial: Mapping[str, str] | None = None,
    tier: str = DEVICE,
) -> Spec:
    """A canonical `Spec`."""
    pending = partial or {}
    ordered = tuple((axis, pending[axis]) for axis in mesh.names if axis in pending)
    return Spec(mesh, tuple(_merge(factors, mesh) for factors in dims), ordered, tier)


def spec_of_layout(layout: Layout, shape: Sequence[int]) -> Spec:
    """The spec of a tensor of `shape` with a plain layout."""
    dims = [((size, axes),) for size, axes in zip(shape, layout.dims, strict=True)]
    return make_spec(layout.mesh, dims, dict(layout.partial), layout.tier)


def spec_of_dims(
    mesh: Mesh,
    dims: FactorDims,
    sizes: Mapping[str, int],
    cuts: Mapping[str, FactorCut],
    partial: Mapping[str, str],
) -> Spec:
    """The spec of an operand whose dims are made of a rule's factors, `cuts` saying who cuts which."""

    def factors(name: str) -> list[Factor]:
        cut = cuts.get(name)
        if cut is None:
            return [(sizes[name], ())]
        return cut.parts(sizes[name])

    return make_spec(mesh, [[part for f in dim for part in factors(f)] for dim in dims], partial)


def ways(axes: Sequence[str], mesh: Mesh) -> int:
    """How many pieces the axes cut."""
    return math.prod(mesh.axis_size(axis) for axis in axes)


def piece(size: int, axes: Sequence[str], mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int]:
    """(offset, size) of the piece at coordinate `at`: cut by the first axis, then the next within it.

    >>> from hyperparallel.layout import Mesh
    >>> piece(5, ("x",), Mesh((2,), ("x",)), {"x": 1})
    (3, 2)
    """
    offset = 0
    for axis in axes:
        chunk = -(-size // mesh.axis_size(axis))
        # Past the end pieces are empty, as torch.chunk's missing ones are.
        start = min(at[axis] * chunk, size)
        offset, size = offset + start, min(chunk, size - start)
    return offset, size


def _merge(factors: Sequence[Factor], mesh: Mesh) -> tuple[Factor, ...]:
    merged: list[Factor] = []
    for size, axes in factors:
        if size == 1 and not axes:
            continue
        if merged:
            outer_size, outer_axes = merged[-1]
            count = ways(outer_axes, mesh)
            # An uncut factor inside an even cut only makes its pieces longer.
            plain_tail = not axes and outer_size % count == 0
            # Each outer piece is a single index, so that the inner axes go on cutting where the outer ones
            # end.
            nested = outer_size == count and size % ways(axes, mesh) == 0
            if plain_tail or nested:
                merged[-1] = (outer_size * size, outer_axes + axes)
                continue
        merged.append((size, tuple(axes)))
    return tuple(merged) or ((1, ()),)


def common_view(src: Spec, dst: Spec) -> tuple[tuple[int, ...], Layout, Layout] | None:
    """A finer shape under which both specs are plain layouts: (shape, src layout, dst layout).

    None where there is none (a factor would have to be cut in the middle of a finer one).
    """
    shape: list[int] = []
    plain: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = ([], [])
    for src_factors, dst_factors in zip(src.dims, dst.dims, strict=True):
        sizes = _refine([s for s, _ in src_factors], [s for s, _ in dst_factors])
        if sizes is None:
            return None
        shape.extend(sizes)
        for spec_dims, factors in zip(plain, (src_factors, dst_factors), strict=True):
            spread = _spread(factors, sizes, src.mesh)
            if spread is None:
                return None
            spec_dims.extend(spread)
    mesh = src.mesh
    return (
        tuple(shape),
        mesh(*plain[0], partial=dict(src.partial), tier=src.tier),
        dst.mesh(*plain[1], partial=dict(dst.partial), tier=dst.tier),
    )


def _refine(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """The coarsest factorisation that refines both: [4, 8] and [32] give [4, 8]."""
    if list(a) == list(b) or len(b) == 1:
        return list(a)
    if len(a) == 1:
        return list(b)
    if math.prod(a) <= 1 or 1 in a or 1 in b:
        return None
    sizes: list[int] = []
    left, right = list(reversed(a)), list(reversed(b))
    while left and right:
        x, y = left.pop(), right.pop()
        # Outermost first, as parts nest; where neither size divides the other, a border would lie inside a
        # factor.
        small = min(x, y)
        if max(x, y) % small:
            return None
        sizes.append(small)
        if x > small:
            left.append(x // small)
        if y > small:
            right.append(y // small)
    return sizes


def _spread(
    factors: Sequence[Factor], sizes: Sequence[int], mesh: Mesh
) -> list[tuple[str, ...]] | None:
    """Deal each factor's axes over the finer sizes that it is made of."""
    spread: list[tuple[str, ...]] = []
    position = 0
    for size, axes in factors:
        parts = [sizes[position]]
        position += 1
        while math.prod(parts) < size:
            parts.append(sizes[position])
            position += 1
        dealt = _deal(axes, parts, mesh)
        if dealt is None:
            return None
        spread.extend(dealt)
    spread.extend([()] * (len(sizes) - len(spread)))  # dims of size one at the end
    return spread


def _deal(axes: Sequence[str], parts: Sequence[int], mesh: Mesh) -> list[tuple[str, ...]] | None:
    dealt: list[list[str]] = [[] for _ in parts]
    if len(parts) == 1:
        return [tuple(axes)]
    at, left = 0, parts[0] if parts else 1
    for axis in axes:
        while at < len(parts) - 1 and left == 1:
            at += 1
            left = parts[at]
        n = mesh.axis_size(axis)
        # The axis would cut through the border of two finer sizes.
        if left % n:
            return None
        dealt[at].append(axis)
        left //= n
    return [tuple(names) for names in dealt]
