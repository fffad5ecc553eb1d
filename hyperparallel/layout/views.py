"""Other meshes over the ranks of a mesh: a part of it, an axis split in several, axes joined to
one.

All three permute or select the explicit rank list, so they hold for every mesh, slices of slices
and permuted lists included. `Mesh.slice`, `.split` and `.flatten` are the public forms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hyperparallel.errors import LayoutError
from hyperparallel.layout.mesh import Mesh


def slice_mesh(mesh: Mesh, picks: Mapping[str, int | slice]) -> Mesh:
    """The ranks whose index along each picked axis is the one, or in the range, given."""
    for name in picks:
        mesh.axis_size(name)
    chosen, shape, names = [], [], []
    for name, size in zip(mesh.names, mesh.shape, strict=True):
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
    by_place = {index: rank for rank, index in mesh._indices.items()}
    return Mesh(shape, names, [by_place[index] for index in itertools.product(*chosen)])


def split_mesh(mesh: Mesh, name: str, parts: Mapping[str, int]) -> Mesh:
    """The axis `name` replaced by the axes of `parts`; row-major, so the rank list stays."""
    size, place = mesh.axis_size(name), mesh.axis_index(name)
    if math.prod(parts.values()) != size or not parts:
        raise LayoutError(f"split of {name}", dict(parts), f"sizes whose product is {size}")
    shape = (*mesh.shape[:place], *parts.values(), *mesh.shape[place + 1 :])
    return Mesh(shape, (*mesh.names[:place], *parts, *mesh.names[place + 1 :]), mesh.ranks)


def flatten_mesh(mesh: Mesh, axes: Sequence[str], name: str) -> Mesh:
    """The axes joined to one, row-major in the order of `axes`, where the first of them stood."""
    if not axes or len(set(axes)) != len(axes):
        raise LayoutError("flatten", tuple(axes), "one or more axes, each once")
    places = [mesh.axis_index(axis) for axis in axes]
    first = places[0]
    order = [place for place in range(len(mesh.shape)) if place == first or place not in places]
    joined = math.prod(mesh.shape[place] for place in places)
    shape = [joined if place == first else mesh.shape[place] for place in order]
    names = [name if place == first else mesh.names[place] for place in order]
    by_place = {index: rank for rank, index in mesh._indices.items()}
    expanded = [place for p in order for place in (places if p == first else [p])]
    ranks = []
    for choice in itertools.product(*(range(mesh.shape[place]) for place in expanded)):
        index = [0] * len(expanded)
        for place, i in zip(expanded, choice, strict=True):
            index[place] = i
        ranks.append(by_place[tuple(index)])
    return Mesh(shape, names, ranks)
