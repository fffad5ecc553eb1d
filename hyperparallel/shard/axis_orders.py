"""In which order the axes of a mesh cut a dim, and how DTensor says it; torch-free.

A `Layout` cuts a dim by its axes in any order. DTensor cuts in the order of its mesh's dims, or, with
`_StridedShard(dim, split_factor)`, as if `split_factor` pieces had been cut before: it takes its part of
each of them. The two ways of speaking agree on which elements a rank holds when pieces are even, and
often when they are not: `is_said_by_strides` compares them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from hyperparallel.layout import Mesh
from hyperparallel.shard.spec import Spec


def axis_order(mesh: Mesh, specs: Iterable[Spec]) -> tuple[str, ...]:
    """The axes of `mesh` in an order that agrees with the cuts of all specs, or of as many as can be.

    Of several such orders the one closest to the mesh's own: it changes only where it must.
    """
    cut = {(axes, size) for spec in specs for axes, size in zip(spec.layout().dims, spec.shape, strict=True)}
    # One axis alone has no order to keep.
    wanted = sorted((axes, size) for axes, size in cut if len(axes) > 1)
    involved = [axis for axis in mesh.names if any(axis in axes for axes, _ in wanted)]

    def complaints(order: tuple[str, ...]) -> tuple[int, int]:
        ordered = _arranged(mesh, order)
        strided = [(axes, size) for axes, size in wanted if max(split_factors(ordered, axes)) > 1]
        unsaid = [axes for axes, size in strided if not is_said_by_strides(ordered, axes, size)]
        # What DTensor cannot say at all counts before what it says by strides.
        return len(unsaid), len(strided)

    # Of equals the first, and the mesh's own order comes first.
    return min(_rearrangements(mesh.names, involved), key=complaints)


def _rearrangements(names: Sequence[str], involved: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The axes with those involved dealt anew over the places they have; as they stand first."""
    for chosen in itertools.permutations(involved):
        rest = iter(chosen)
        yield tuple(next(rest) if name in involved else name for name in names)


def _arranged(mesh: Mesh, order: Sequence[str]) -> Mesh:
    """A mesh of the same axes in another order (its ranks do not matter here)."""
    return Mesh([mesh.axis_size(axis) for axis in order], order)


def split_factors(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """For axes that cut a dim in this order, how many pieces those have cut that stand later in the mesh.

    >>> split_factors(Mesh((4, 3, 2), ("a", "b", "c")), ("c", "a", "b"))
    (1, 2, 2)
    """
    place = mesh.axis_index
    return tuple(
        math.prod(mesh.axis_size(before) for before in axes[:i] if place(before) > place(axis))
        for i, axis in enumerate(axes)
    )


def order_from_factors(mesh: Mesh, factors: Sequence[tuple[str, int]]) -> tuple[str, ...] | None:
    """The inverse: axes in mesh order with their split factors -> the order in which they cut.

    None where no order has these factors.

    >>> order_from_factors(Mesh((4, 3, 2), ("a", "b", "c")), [("a", 2), ("b", 2), ("c", 1)])
    ('c', 'a', 'b')
    """
    order: list[str] = []
    # From the last axis of the mesh on, all that can have cut before an axis and stand later are placed:
    # where their sizes multiply to its factor, it stands.
    for axis, factor in reversed(factors):
        before = [math.prod(map(mesh.axis_size, order[:i])) for i in range(len(order) + 1)]
        if factor not in before:
            return None
        order.insert(before.index(factor), axis)
    return tuple(order)


def is_said_by_strides(mesh: Mesh, axes: Sequence[str], size: int) -> bool:
    """Whether strided placements give every rank the very elements that cutting in order gives it.

    >>> mesh = Mesh((4, 2), ("dp", "tp"))
    >>> is_said_by_strides(mesh, ("tp", "dp"), 16), is_said_by_strides(mesh, ("tp", "dp"), 9)
    (True, False)
    """
    sizes = [mesh.axis_size(axis) for axis in axes]
    # Even pieces agree by arithmetic; uneven ones are compared rank by rank.
    if size % math.prod(sizes) == 0:
        return True
    factors = dict(zip(axes, split_factors(mesh, axes), strict=True))
    in_mesh_order = sorted(axes, key=mesh.axis_index)
    for indices in itertools.product(*map(range, sizes)):
        at = dict(zip(axes, indices, strict=True))
        nested = [range(size)]
        for axis in axes:
            nested = _chunk(nested, mesh.axis_size(axis), at[axis])
        strided = [range(size)]
        for axis in in_mesh_order:
            whole, parts = strided, factors[axis]
            strided = []
            for part in range(parts):
                strided += _chunk(_chunk(whole, parts, part), mesh.axis_size(axis), at[axis])
        if _merged(nested) != _merged(strided):
            return False
    return True


def _chunk(elements: Sequence[range], parts: int, index: int) -> list[range]:
    """Piece `index` of `parts`, cut as torch.chunk does, of elements given as runs in order."""
    total = sum(map(len, elements))
    length = -(-total // parts)
    start, stop, found, at = index * length, (index + 1) * length, [], 0
    for run in elements:
        found.append(run[max(start - at, 0) : max(stop - at, 0)])
        at += len(run)
    return found


def _merged(runs: Sequence[range]) -> list[range]:
    """The same elements as few runs."""
    found: list[range] = []
    for run in runs:
        if found and run and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        elif run:
            found.append(run)
    return found
