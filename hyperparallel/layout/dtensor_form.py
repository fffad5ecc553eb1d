"""A layout seen mesh axis by mesh axis, as DTensor writes placements; torch-free.

DTensor says what each mesh axis does ("shard dim 0", "replicate", "partial sum"); of several axes
on one dim the one standing first in the mesh cuts first. Layouts that cut in another order have no
such form and are refused rather than reordered.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyperparallel.errors import LayoutError
from hyperparallel.layout.layout import Layout, Mesh

Placement = tuple[str] | tuple[str, int] | tuple[str, str]
"""("replicate",), ("shard", dim) or ("partial", op)."""


def placements(layout: Layout) -> tuple[Placement, ...]:
    """What each mesh axis does, in mesh order; LayoutError if a dim is cut in another order.

    >>> placements(Mesh((2, 2), ("dp", "tp"))(None, "dp", partial={"tp": "sum"}))
    (('shard', 1), ('partial', 'sum'))
    """
    places = layout.mesh._places
    found: dict[str, Placement] = {axis: ("partial", op) for axis, op in layout.partial}
    for dim, axes in enumerate(layout.dims):
        ordered = tuple(sorted(axes, key=places.__getitem__))
        if axes != ordered:
            allowed = f"axes in mesh order {layout.mesh.names}: placements cannot say another"
            raise LayoutError(f"tensor_map[{dim}]", axes, allowed, str(ordered))
        found.update(dict.fromkeys(axes, ("shard", dim)))
    return tuple(found.get(axis, ("replicate",)) for axis in layout.mesh.names)


def from_placements(mesh: Mesh, given: Sequence[Placement], ndim: int, tier: str = "device") -> Layout:
    """The layout of a tensor with `ndim` dims whose axes do what `given` says, in mesh order.

    >>> from_placements(Mesh((2, 2), ("dp", "tp")), (("shard", 1), ("replicate",)), 2)
    Mesh((2, 2), ("dp", "tp"))(None, "dp")
    """
    if len(given) != len(mesh.names):
        raise LayoutError("placements", tuple(given), f"one per axis of {mesh.names}")
    dims: list[tuple[str, ...]] = [()] * ndim
    partial: dict[str, str] = {}
    for axis, (kind, *rest) in zip(mesh.names, given, strict=True):
        if kind == "shard" and rest and isinstance(rest[0], int) and -ndim <= rest[0] < ndim:
            dims[rest[0]] += (axis,)
        elif kind == "partial" and rest and isinstance(rest[0], str):
            partial[axis] = rest[0]
        elif kind != "replicate":
            allowed = f"('replicate',), ('shard', 0 to {ndim - 1}) or ('partial', op)"
            raise LayoutError(f"placement of {axis}", (kind, *rest), allowed)
    return mesh(*dims, partial=partial, tier=tier)
