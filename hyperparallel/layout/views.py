"""Other grids over the ranks of a grid: a part of it, an axis split in several, axes joined to one.

All three permute or select the explicit rank list, so they hold for every grid, slices of slices
and permuted lists included. `Mesh.slice`, `.split` and `.flatten` are the public forms; here each
gives the fields of the new grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hyperparallel.errors import LayoutError
from hyperparallel.layout.grid import Grid

GridFields = tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]
"""Shape, names and ranks of a grid."""


def slice_grid(grid: Grid, picks: Mapping[str, int | slice]) -> GridFields:
    """The ranks whose index along each picked axis is the one, or in the range, given."""
    for name in picks:
        grid.axis_size(name)
    chosen, shape, names = [], [], []
    for name, size in zip(grid.names, grid.shape, strict=True):
        pick = picks.get(name, slice(None))
        if isinstance(pick, slice):
            indices = range(size)[pick]
            shape.append(len(indices))
            names.append(name)
        elif 0 <= pick < size:
            indices = range(pick, pick + 1)
        else:
            raise LayoutError(f"slice of {name}", pick, f"0 to {size - 1}, or a slice")
        if not indices:
            allowed = f"a range that keeps some of 0 to {size - 1}"
            raise LayoutError(f"slice of {name}", pick, allowed)
        chosen.append(indices)
    by_place = {index: rank for rank, index in grid._indices.items()}
    ranks = tuple(by_place[index] for index in itertools.product(*chosen))
    return tuple(shape), tuple(names), ranks


def split_axis(grid: Grid, name: str, parts: Mapping[str, int]) -> GridFields:
    """The axis `name` replaced by the axes of `parts`; row-major, so the rank list stays."""
    size, place = grid.axis_size(name), grid.axis_index(name)
    if math.prod(parts.values()) != size or not parts:
        raise LayoutError(f"split of {name}", dict(parts), f"sizes whose product is {size}")
    shape = (*grid.shape[:place], *parts.values(), *grid.shape[place + 1 :])
    return shape, (*grid.names[:place], *parts, *grid.names[place + 1 :]), grid.ranks


def flatten_axes(grid: Grid, axes: Sequence[str], name: str) -> GridFields:
    """The axes joined to one, row-major in the order of `axes`, where the first of them stood."""
    if not axes or len(set(axes)) != len(axes):
        raise LayoutError("flatten", tuple(axes), "one or more axes, each once")
    places = [grid.axis_index(axis) for axis in axes]
    first = places[0]
    order = [place for place in range(len(grid.shape)) if place == first or place not in places]
    joined = math.prod(grid.shape[place] for place in places)
    shape = [joined if place == first else grid.shape[place] for place in order]
    names = [name if place == first else grid.names[place] for place in order]
    by_place = {index: rank for rank, index in grid._indices.items()}
    expanded = [place for p in order for place in (places if p == first else [p])]
    ranks = []
    for choice in itertools.product(*(range(grid.shape[place]) for place in expanded)):
        index = [0] * len(expanded)
        for place, i in zip(expanded, choice, strict=True):
            index[place] = i
        ranks.append(by_place[tuple(index)])
    return tuple(shape), tuple(names), tuple(ranks)
