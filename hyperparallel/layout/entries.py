"""What people write for a layout, made canonical: entries of the dims, pending reductions, the tier.

Axes of size one say nothing and are dropped; every axis that is named is checked against the grid,
and no axis may stand twice in one tensor. `layout.py` interns what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyperparallel.errors import LayoutError, nearest
from hyperparallel.layout.grid import Grid

DimSpec = str | int | Sequence[str] | None
"""One dim as people write it: None or "None", an axis, axes outermost first, or a paper-style
int."""

Dims = tuple[tuple[str, ...], ...]
"""Per tensor dim the axes that cut it, outermost first."""

DEVICE = "device"
"""The memory that programs compute in; every other tier is one that pieces are kept in."""

Partial = tuple[tuple[str, str], ...]
"""(axis, operation) pairs in mesh order."""

REDUCTIONS = ("sum", "max", "min", "prod")
"""The operations that can be pending on an axis; each is associative and has a neutral element."""


def canonical_dims(grid: Grid, dims: Sequence[Any]) -> Dims:
    """The axes of every dim; LayoutError for one that is unknown or used twice.

    >>> canonical_dims(Grid((2, 1), ("dp", "tp")), ("tp", 1, ["dp"]))
    Traceback (most recent call last):
    ...
    hyperparallel.errors.LayoutError: tensor_map: got ('tp', 1, ['dp']); allowed: each axis once per tensor;\
 'dp' is used twice
    """
    clean, used = [], set()
    for dim, entry in enumerate(dims):
        axes = []
        for axis in _entry_axes(grid, entry):
            if axis in used:
                raise LayoutError("tensor_map", dims, f"each axis once per tensor; {axis!r} is used twice")
            # Axes of size one count too: a plan must not become wrong when the mesh grows.
            used.add(axis)
            if _axis_size(grid, axis, f"tensor_map[{dim}]") > 1:
                axes.append(axis)
        clean.append(tuple(axes))
    return tuple(clean)


def _entry_axes(grid: Grid, entry: Any) -> tuple[str, ...]:
    if entry is None or entry == "None":
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, int):
        if not -1 <= entry < len(grid.names):
            allowed = f"-1 (whole) or 0 to {len(grid.names) - 1}, counted from the right"
            raise LayoutError("tensor_map", entry, allowed)
        # The paper's tensor map counts axes from the right: 0 is the innermost.
        return () if entry == -1 else (grid.names[len(grid.names) - 1 - entry],)
    return tuple(axis for part in entry for axis in _entry_axes(grid, part))


def canonical_partial(grid: Grid, partial: Mapping[str, str], dims: Dims) -> Partial:
    """The pending reductions in mesh order; LayoutError for an axis that cuts one of `dims`."""
    if not partial:
        return ()
    cut = {axis for axes in dims for axis in axes}
    for axis, op in partial.items():
        _axis_size(grid, axis, "partial")
        if axis in cut:
            raise LayoutError("partial", axis, "an axis that cuts no dim of the same tensor")
        if op not in REDUCTIONS:
            raise LayoutError(f"partial[{axis!r}]", op, "one of " + ", ".join(REDUCTIONS))
    sizes = zip(grid.names, grid.shape, strict=True)
    return tuple((axis, partial[axis]) for axis, size in sizes if axis in partial and size > 1)


def check_tier(tier: object) -> None:
    """LayoutError unless this can be the name of a memory."""
    if not isinstance(tier, str) or not tier.replace("-", "_").isidentifier():
        raise LayoutError("tier", tier, "a memory name such as device, host or disk")


def _axis_size(grid: Grid, axis: object, field: str) -> int:
    size = grid._sizes.get(axis) if isinstance(axis, str) else None
    if size is None:
        near = nearest(str(axis), grid.names)
        known = ", ".join(grid.names) or "no axis at all"
        raise LayoutError(field, axis, f"None or one of {known}", near)
    return size
