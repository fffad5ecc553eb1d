"""A layout: how one tensor lies over the ranks of a mesh, as one frozen, canonical value.

`Layout((2, 2), ("dp", "tp"))` is a mesh; calling it with one entry per tensor dim gives the layout:
`None` leaves a dim whole, `"dp"` cuts it, `("dp", "tp")` cuts it nested, first in |dp| pieces and
each of those in |tp|. One cut of n elements in k makes pieces of ceil(n / k); the last ones are
smaller or empty. `partial={"tp": "sum"}` says that the value is the sum of what the ranks along tp
hold; with several such axes the one standing last in the mesh is reduced first, which only matters
where the operations differ. `tier` is the memory the pieces lie in.

Equal meaning, equal value: axes of size one are dropped, partial axes stand in mesh order, and
layouts of one mesh object are interned on it, so they compare by identity. Index arithmetic is in
`shards.py`, text in `text.py`, the way between two layouts in `reshard.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyperparallel.errors import LayoutError, nearest
from hyperparallel.layout.mesh import Mesh

DimSpec = str | int | Sequence[str] | None
"""One dim as people write it: None or "None", an axis, axes outermost first, or a paper-style
int."""

REDUCTIONS = ("sum", "max", "min", "prod")
"""The operations that can be pending on an axis; each is associative and has a neutral element."""


class Layout:
    """Where each piece of a tensor lies; built by calling a mesh.

    mesh: the ranks; dims: per tensor dim the axes that cut it, outermost first; partial: (axis, op)
    pairs in mesh order; tier: name of the memory. Raises LayoutError for unknown or repeated axes.

    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> mesh("dp", None, partial={"tp": "sum"})
    Layout((2, 2), ("dp", "tp"))("dp", None, partial={"tp": "sum"})
    >>> Layout((2, 2), ("dp", "tp"), (("dp", "tp"), None)).slices((5, 3), 1)
    (slice(2, 3, None), slice(0, 3, None))
    """

    __slots__ = ("__weakref__", "_hash", "_lookup", "dims", "mesh", "partial", "tier")
    mesh: Mesh
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...]
    tier: str
    _hash: int
    _lookup: dict[object, Any]

    def __new__(
        cls,
        device_matrix: Sequence[int],
        alias_name: Sequence[str],
        tensor_map: Sequence[DimSpec] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        partial: Mapping[str, str] | None = None,
        tier: str = "device",
    ) -> Any:
        """A mesh from two arguments, a layout from three (ints: i-th axis from the right, -1
        none)."""
        mesh = Mesh(device_matrix, alias_name, ranks)
        if tensor_map is None:
            return mesh
        return mesh(*tensor_map, partial=partial, tier=tier)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is frozen; use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Layout is frozen; {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        mine, theirs = (self.dims, self.partial, self.tier), (other.dims, other.partial, other.tier)
        return mine == theirs and self.mesh == other.mesh

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return build, (self.mesh, self.dims, dict(self.partial), self.tier)

    def __repr__(self) -> str:
        from hyperparallel.layout.text import write

        return write(self)

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that `str` wrote; LayoutError says what is wrong with the text.

        >>> Layout.parse('Layout((2,), ("dp",))("dp", None)').dims
        (('dp',), ())
        """
        from hyperparallel.layout.text import read

        return read(text)

    @staticmethod
    def full(mesh: Mesh, ndim: int, tier: str = "device") -> Layout:
        """Every rank holds the whole tensor.

        >>> Layout.full(Mesh((2,), ("dp",)), 2)
        Layout((2,), ("dp",))(None, None)
        """
        return mesh(*(None,) * ndim, tier=tier)

    def replace(
        self,
        *,
        mesh: Mesh | None = None,
        dims: Sequence[DimSpec] | None = None,
        partial: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        tier: str | None = None,
    ) -> Layout:
        """The same layout with some fields changed.

        >>> Mesh((2,), ("dp",))("dp").replace(dims=(None,), tier="host")
        Layout((2,), ("dp",))(None, tier="host")
        """
        return build(
            self.mesh if mesh is None else mesh,
            self.dims if dims is None else tuple(dims),
            dict(self.partial if partial is None else partial),
            self.tier if tier is None else tier,
        )

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.dims)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes that cut some dim, in mesh order."""
        used = {axis for axes in self.dims for axis in axes}
        return tuple(axis for axis in self.mesh.names if axis in used)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes with a pending reduction, in mesh order."""
        return tuple(axis for axis, _ in self.partial)

    @property
    def free_axes(self) -> tuple[str, ...]:
        """Axes longer than one along which the ranks hold the same, in mesh order."""
        used = {axis for axes in self.dims for axis in axes} | {axis for axis, _ in self.partial}
        sizes = zip(self.mesh.names, self.mesh.shape, strict=True)
        return tuple(axis for axis, size in sizes if size > 1 and axis not in used)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole, final value."""
        return not self.partial and not any(self.dims)

    # The index arithmetic stands in `shards.py`; here it only becomes methods.

    def slices(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """The part of the tensor that a rank holds, as one slice per dim.

        An empty piece is an empty slice at the end of the piece it was cut from.
        """
        from hyperparallel.layout.shards import slices

        return slices(self, shape, rank)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the piece that a rank holds of a tensor of global shape `shape`.

        >>> Mesh((4,), ("dp",))("dp", None).local_shape((5, 2), 3)
        (0, 2)
        """
        from hyperparallel.layout.shards import slices

        return tuple(part.stop - part.start for part in slices(self, shape, rank))

    def largest_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the largest piece, which the rank with all indices zero holds."""
        from hyperparallel.layout.shards import largest_shape

        return largest_shape(self, shape)

    def global_index(self, shape: Sequence[int], rank: int, local_index: Sequence[int]) -> tuple[int, ...]:
        """The place in the whole tensor of an element of a rank's piece.

        >>> Mesh((2,), ("dp",))("dp", None).global_index((5, 2), 1, (1, 0))
        (4, 0)
        """
        from hyperparallel.layout.shards import global_index

        return global_index(self, shape, rank, local_index)

    def local_index(
        self, shape: Sequence[int], rank: int, global_index: Sequence[int]
    ) -> tuple[int, ...] | None:
        """The place of an element of the whole tensor in a rank's piece; None if it is not
        there."""
        from hyperparallel.layout.shards import local_index

        return local_index(self, shape, rank, global_index)

    def owners(
        self, shape: Sequence[int], global_index: Sequence[int]
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """All (rank, local index) that hold an element; along a partial axis each holds a summand.

        >>> Mesh((2, 2), ("dp", "tp"))("dp").owners((5,), (4,))
        ((2, (1,)), (3, (1,)))
        """
        from hyperparallel.layout.shards import owners

        return owners(self, shape, global_index)


def build(mesh: Mesh, dims: Sequence[DimSpec], partial: Mapping[str, str], tier: str) -> Layout:
    """The one layout that these arguments mean, interned on its mesh object."""
    try:
        given = tuple(d if d is None or isinstance(d, str | int) else tuple(d) for d in dims)
        key = (given, tier, tuple(partial.items()))
        found = mesh._layouts.get(key)
    except (TypeError, AttributeError):
        allowed = "axis names, tuples of them, or None; partial: a dict from axis to operation"
        raise LayoutError("tensor_map", (*dims, partial), allowed) from None
    if found is None:
        clean = _clean_dims(mesh, given)
        pending = _clean_partial(mesh, partial, clean)
        _check_tier(tier)
        found = _intern(mesh, clean, pending, tier)
        mesh._layouts[key] = found
    return found


def _intern(
    mesh: Mesh,
    dims: tuple[tuple[str, ...], ...],
    partial: tuple[tuple[str, str], ...],
    tier: str,
) -> Layout:
    """The layout of already canonical fields."""
    key = (dims, partial, tier)
    found = mesh._layouts.get(key)
    if found is None:
        found = object.__new__(Layout)
        put = object.__setattr__
        put(found, "mesh", mesh)
        put(found, "dims", dims)
        put(found, "partial", partial)
        put(found, "tier", tier)
        put(found, "_hash", hash((mesh._hash, dims, partial, tier)))
        put(found, "_lookup", {})
        mesh._layouts[key] = found
    return found


def _clean_dims(mesh: Mesh, dims: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    clean, used = [], set()
    for dim, entry in enumerate(dims):
        axes = []
        for axis in _entry_axes(mesh, entry):
            if axis in used:
                raise LayoutError("tensor_map", dims, f"each axis once per tensor; {axis!r} is used twice")
            used.add(axis)
            if _axis_size(mesh, axis, f"tensor_map[{dim}]") > 1:
                axes.append(axis)
        clean.append(tuple(axes))
    return tuple(clean)


def _entry_axes(mesh: Mesh, entry: Any) -> tuple[str, ...]:
    if entry is None or entry == "None":
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, int):
        if not -1 <= entry < len(mesh.names):
            allowed = f"-1 (whole) or 0 to {len(mesh.names) - 1}, counted from the right"
            raise LayoutError("tensor_map", entry, allowed)
        return () if entry == -1 else (mesh.names[len(mesh.names) - 1 - entry],)
    return tuple(axis for part in entry for axis in _entry_axes(mesh, part))


def _clean_partial(
    mesh: Mesh, partial: Mapping[str, str], dims: Sequence[Sequence[str]]
) -> tuple[tuple[str, str], ...]:
    if not partial:
        return ()
    cut = {axis for axes in dims for axis in axes}
    for axis, op in partial.items():
        _axis_size(mesh, axis, "partial")
        if axis in cut:
            raise LayoutError("partial", axis, "an axis that cuts no dim of the same tensor")
        if op not in REDUCTIONS:
            raise LayoutError(f"partial[{axis!r}]", op, "one of " + ", ".join(REDUCTIONS))
    sizes = zip(mesh.names, mesh.shape, strict=True)
    return tuple((axis, partial[axis]) for axis, size in sizes if axis in partial and size > 1)


def _axis_size(mesh: Mesh, axis: object, field: str) -> int:
    size = mesh._sizes.get(axis) if isinstance(axis, str) else None
    if size is None:
        near = nearest(str(axis), mesh.names)
        known = ", ".join(mesh.names) or "no axis at all"
        raise LayoutError(field, axis, f"None or one of {known}", near)
    return size


def _check_tier(tier: object) -> None:
    if not isinstance(tier, str) or not tier.replace("-", "_").isidentifier():
        raise LayoutError("tier", tier, "a memory name such as device, host or disk")
