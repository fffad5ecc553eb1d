"""Layouts as a region declares them: by axis names, on whatever mesh the plan has.

One layout is written as a tuple with one entry per dim (`("dp", None)`: an axis, several, or None), as
None (replicated, any number of dims), or as a `Layout`. A mapping at the end of a tuple says what
is pending: `("dp", None, {"tp": "sum"})`. Several layouts stand in a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyperparallel.errors import LayoutError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.layout.carried import check_all

DimEntry = Any
"""None, a tuple, or a `Layout`."""


def layout_list(given: Any, field: str) -> tuple[DimEntry, ...]:
    """The layouts of a list; a single layout alone is a list of one. None may say a memory tier."""
    entries: tuple[DimEntry, ...]
    if isinstance(given, list) or (
        isinstance(given, tuple) and given and all(isinstance(x, Layout) for x in given)
    ):
        entries = tuple(given)
    elif given is None or isinstance(given, (tuple, Layout)):
        entries = (given,)
    else:
        allowed = 'a layout, or a list of layouts; a layout is a tuple such as ("dp", None), None or a Layout'
        raise LayoutError(field, given, allowed, "[(...), (...)]")
    check_all(entries, field)
    return entries


def mesh_of(entries: Sequence[DimEntry], given: Mesh | None, field: str) -> Mesh | None:
    """The mesh that layouts were made on, if any was."""
    for entry in entries:
        if isinstance(entry, Layout):
            if given is not None and entry.mesh != given:
                raise LayoutError(field, str(entry), f"a layout on {given}")
            given = entry.mesh
    return given


def check_rank(entry: DimEntry, ndim: int, what: str) -> None:
    """`LayoutError` for a layout with another number of entries than the tensor has dims."""
    if entry is None:
        return
    dims = entry.dims if isinstance(entry, Layout) else _split(entry, what)[0]
    if len(dims) != ndim:
        shown = str(entry) if isinstance(entry, Layout) else entry
        raise LayoutError(f"layout of {what}", shown, f"{ndim} entries, one per dim of the tensor")


def resolve(entry: DimEntry, mesh: Mesh, ndim: int, what: str) -> Layout:
    """The layout of a tensor of `ndim` dims on a mesh."""
    check_rank(entry, ndim, what)
    if entry is None:
        return Layout.full(mesh, ndim)
    if isinstance(entry, Layout):
        if entry.mesh != mesh:
            raise LayoutError(f"layout of {what}", str(entry), f"a layout on the plan's mesh {mesh}")
        return entry
    dims, partial = _split(entry, what)
    try:
        found = mesh(*dims, partial=partial)
    except LayoutError as error:
        raise LayoutError(
            f"layout of {what}: {error.field}", error.given, error.allowed, error.instead
        ) from None
    assert isinstance(found, Layout)
    return found


def _split(entry: DimEntry, what: str) -> tuple[tuple[Any, ...], Mapping[str, str]]:
    if isinstance(entry, str):
        entry = (entry,)
    if not isinstance(entry, tuple):
        raise LayoutError(f"layout of {what}", entry, 'a tuple such as ("dp", None), None or a Layout')
    if entry and isinstance(entry[-1], Mapping):
        return entry[:-1], entry[-1]
    return entry, {}


def transposed(layout: Layout) -> Layout:
    """The layout of the gradient of a value laid out so, if every rank's own gradient is just left there.

    Cut stays cut; what was replicated on an axis comes back as a pending sum, and a pending sum replicated.

    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> transposed(mesh("dp", None))
    Mesh((2, 2), ("dp", "tp"))("dp", None, partial={"tp": "sum"})
    """
    mesh = layout.mesh
    taken = {axis for axes in layout.dims for axis in axes} | {axis for axis, _ in layout.partial}
    return layout.replace(partial={axis: "sum" for axis in mesh.names if axis not in taken})


def joined_shape(layout: Layout, local: Mapping[int, tuple[int, ...]], what: str) -> tuple[int, ...]:
    """The global shape of a tensor whose pieces have these shapes, by rank, checked."""
    mesh = layout.mesh
    shape = []
    for dim, axes in enumerate(layout.dims):
        first = mesh.ranks[0]
        # A rank that did not rehearse is as large as the first: cuts are even there.
        sizes = [local.get(rank, local[first])[dim] for rank in mesh.group(first, axes)] if axes else []
        shape.append(sum(sizes) if axes else local[first][dim])
    for rank, have in local.items():
        want = layout.local_shape(shape, rank)
        if tuple(have) != tuple(want):
            dims = [d for d, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
            axes_text = ", ".join(axis for axis in layout.dims[dims[0]]) or "no axis"
            raise LayoutError(
                what, f"shape {list(have)} on rank {rank}",
                f"{list(want)}: dim {dims[0]} of {shape[dims[0]]} cut by {axes_text}, as by {layout}",
            )  # fmt: skip
    return tuple(shape)


def uneven(layouts: Sequence[Layout], shapes: Sequence[Sequence[int]]) -> str:
    """Which dims the layouts do not divide evenly, in words; "" if there are none."""
    said = []
    for i, (layout, shape) in enumerate(zip(layouts, shapes, strict=True)):
        for dim, axes in enumerate(layout.dims):
            ways = 1
            for axis in axes:
                ways *= layout.mesh.axis_size(axis)
            if shape[dim] % ways:
                said.append(f"dim {dim} of argument {i} has size {shape[dim]}: {' x '.join(axes)}={ways} "
                            "does not divide")  # fmt: skip
    return "; ".join(said)
