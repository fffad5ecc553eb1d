"""A mesh, and a layout: how one tensor lies over its ranks, both frozen, canonical values.

`Mesh((2, 2), ("dp", "tp"))`, or in the paper's words `Layout((2, 2), ("dp", "tp"))`, is a mesh;
calling it with one entry per tensor dim gives the layout: `None` leaves a dim whole, `"dp"` cuts
it, `("dp", "tp")` cuts it nested, first in |dp| pieces and each of those in |tp|. One cut of n
elements in k makes pieces of ceil(n / k); the last ones are smaller or empty.
`partial={"tp": "sum"}` says that the value is the sum of what the ranks along tp hold; with several
such axes the one standing last in the mesh is reduced first, which only matters where the
operations differ. `tier` is the memory the pieces lie in.

Equal meaning, equal value: axes of size one are dropped, partial axes stand in mesh order, and
layouts of one mesh object are interned on it, so they compare by identity. A mesh makes layouts and
a layout knows its mesh, so both stand here; what they are made of stands below: coordinates and
groups in `grid.py`, the checks of entries in `entries.py`, index arithmetic in `shards.py`, text in
`text.py`. The way between two layouts is in `reshard.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from hyperparallel.errors import LayoutError
from hyperparallel.layout import shards, views
from hyperparallel.layout.entries import (
    Dims,
    DimSpec,
    Partial,
    canonical_dims,
    canonical_partial,
    check_tier,
)
from hyperparallel.layout.grid import Grid
from hyperparallel.layout.text import read_layout, write_layout


class Mesh(Grid):
    """Ranks in a named grid, frozen; calling it makes a `Layout`.

    shape: number of ranks along each axis; names: one per axis; ranks: row-major, 0..size-1 if not
    given. Raises LayoutError for sizes below one, repeated names, or a rank list of another length.

    >>> mesh = Mesh((2, 2), ("dp", "tp"))
    >>> mesh
    Mesh((2, 2), ("dp", "tp"))
    >>> mesh.coordinate(3), mesh.group(3, "dp")
    ({'dp': 1, 'tp': 1}, (1, 3))
    """

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None = None
    ) -> None:
        super().__init__(shape, names, ranks)
        self.__dict__["_layouts"] = {}

    def __call__(
        self,
        *dims: DimSpec,
        partial: Mapping[str, str] | None = None,
        tier: str = "device",
    ) -> Layout:
        """The layout of a tensor with one entry per dim: None, an axis, or axes outermost first.

        >>> Mesh((2, 2), ("dp", "tp"))("dp", None).dims
        (('dp',), ())
        """
        return make_layout(self, dims, partial or {}, tier)

    # The rearrangements stand in `views.py`; here they only become methods.

    def slice(self, **picks: int | slice) -> Mesh:
        """The part of the mesh at an index of an axis (the axis goes) or a range of it (it stays).

        >>> Mesh((2, 2), ("dp", "tp")).slice(dp=1)
        Mesh((2,), ("tp",), ranks=(2, 3))
        """
        return Mesh(*views.slice_grid(self, picks))

    def split(self, name: str, parts: Mapping[str, int]) -> Mesh:
        """One axis as several, outermost first; the product of their sizes must be its size.

        >>> Mesh((4,), ("world",)).split("world", {"dp": 2, "tp": 2})
        Mesh((2, 2), ("dp", "tp"))
        """
        return Mesh(*views.split_axis(self, name, parts))

    def flatten(self, axes: Sequence[str], name: str) -> Mesh:
        """Several axes as one, row-major in the order given, standing where the first one stood.

        >>> Mesh((2, 2), ("dp", "tp")).flatten(("tp", "dp"), "world")
        Mesh((4,), ("world",), ranks=(0, 2, 1, 3))
        """
        return Mesh(*views.flatten_axes(self, axes, name))

    def rename(self, names: Mapping[str, str]) -> Mesh:
        """The same ranks under other axis names.

        >>> Mesh((2,), ("dp",)).rename({"dp": "data"})
        Mesh((2,), ("data",))
        """
        for name in names:
            self.axis_size(name)
        return Mesh(self.shape, [names.get(name, name) for name in self.names], self.ranks)

    # Set in __init__ behind the frozen __setattr__.
    _layouts: dict[object, Layout]


class Layout:
    """Where each piece of a tensor lies; built by calling a mesh.

    mesh: the ranks; dims: per tensor dim the axes that cut it, outermost first; partial: (axis, op)
    pairs in mesh order; tier: name of the memory. Raises LayoutError for unknown or repeated axes.

    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> mesh("dp", None, partial={"tp": "sum"})
    Mesh((2, 2), ("dp", "tp"))("dp", None, partial={"tp": "sum"})
    >>> Layout((2, 2), ("dp", "tp"), (("dp", "tp"), None)).slices((5, 3), 1)
    (slice(2, 3, None), slice(0, 3, None))
    """

    __slots__ = ("__weakref__", "_hash", "dims", "mesh", "partial", "tier")
    mesh: Mesh
    dims: Dims
    partial: Partial
    tier: str
    _hash: int

    # Two arguments give no Layout but a mesh, as in the paper: type checkers are told so.
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        device_matrix: Sequence[int],
        alias_name: Sequence[str],
        *,
        ranks: Sequence[int] | None = None,
    ) -> Mesh: ...

    @overload
    def __new__(
        cls,
        device_matrix: Sequence[int],
        alias_name: Sequence[str],
        tensor_map: Sequence[DimSpec],
        *,
        ranks: Sequence[int] | None = None,
        partial: Mapping[str, str] | None = None,
        tier: str = "device",
    ) -> Layout: ...

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
        if isinstance(tensor_map, str):
            raise LayoutError("tensor_map", tensor_map, "a sequence, one entry per dim", f"({tensor_map!r},)")
        if tensor_map is not None:
            return mesh(*tensor_map, partial=partial, tier=tier)
        for field, given, default in (("partial", partial, None), ("tier", tier, "device")):
            if given != default:
                raise LayoutError(field, given, "a field of a layout, not of a mesh", "tensor_map too")
        return mesh

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is frozen; use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Layout is frozen; {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Interned per mesh object: equal layouts of equal meshes may still be two objects.
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        mine, theirs = (self.dims, self.partial, self.tier), (other.dims, other.partial, other.tier)
        return mine == theirs and self.mesh == other.mesh

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return make_layout, (self.mesh, self.dims, dict(self.partial), self.tier)

    def __repr__(self) -> str:
        return write_layout(self.mesh, self.dims, self.partial, self.tier)

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that `str` wrote; LayoutError says what is wrong with the text.

        >>> Layout.parse('Mesh((2,), ("dp",))("dp", None)').dims
        (('dp',), ())
        """
        mesh, dims, options = read_layout(text)
        return Mesh(*mesh)(*dims, **options)

    @staticmethod
    def full(mesh: Mesh, ndim: int, tier: str = "device") -> Layout:
        """Every rank holds the whole tensor.

        >>> Layout.full(Mesh((2,), ("dp",)), 2)
        Mesh((2,), ("dp",))(None, None)
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
        Mesh((2,), ("dp",))(None, tier="host")
        """
        return make_layout(
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
        return shards.slices(self.mesh, self.dims, shape, rank)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the piece that a rank holds of a tensor of global shape `shape`.

        >>> Mesh((4,), ("dp",))("dp", None).local_shape((5, 2), 3)
        (0, 2)
        """
        return tuple(part.stop - part.start for part in self.slices(shape, rank))

    def largest_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the largest piece, which the rank with all indices zero holds."""
        return shards.largest_shape(self.mesh, self.dims, shape)

    def global_index(self, shape: Sequence[int], rank: int, local_index: Sequence[int]) -> tuple[int, ...]:
        """The place in the whole tensor of an element of a rank's piece.

        >>> Mesh((2,), ("dp",))("dp", None).global_index((5, 2), 1, (1, 0))
        (4, 0)
        """
        return shards.global_index(self.mesh, self.dims, shape, rank, local_index)

    def local_index(
        self, shape: Sequence[int], rank: int, global_index: Sequence[int]
    ) -> tuple[int, ...] | None:
        """The place of an element of the whole tensor in a rank's piece; None if it is not
        there."""
        return shards.local_index(self.mesh, self.dims, shape, rank, global_index)

    def owners(
        self, shape: Sequence[int], global_index: Sequence[int]
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """All (rank, local index) that hold an element; along a partial axis each holds a summand.

        >>> Mesh((2, 2), ("dp", "tp"))("dp").owners((5,), (4,))
        ((2, (1,)), (3, (1,)))
        """
        return shards.owners(self.mesh, self.dims, shape, global_index)


def make_layout(mesh: Mesh, dims: Sequence[DimSpec], partial: Mapping[str, str], tier: str) -> Layout:
    """The one layout that these arguments mean, interned on its mesh object."""
    try:
        given = tuple(d if d is None or isinstance(d, str | int) else tuple(d) for d in dims)
        # As it was written: a spelling that came before needs no checks. Canonical keys have the tier last,
        # so that the two kinds never meet in one table.
        key = (given, tier, tuple(partial.items()))
        found = mesh._layouts.get(key)
    except (TypeError, AttributeError):
        allowed = "axis names, tuples of them, or None; partial: a dict from axis to operation"
        raise LayoutError("tensor_map", (*dims, partial), allowed) from None
    if found is None:
        clean = canonical_dims(mesh, given)
        pending = canonical_partial(mesh, partial, clean)
        check_tier(tier)
        found = _intern(mesh, clean, pending, tier)
        mesh._layouts[key] = found
    return found


def _intern(
    mesh: Mesh,
    dims: Dims,
    partial: Partial,
    tier: str,
) -> Layout:
    """The layout of already canonical fields."""
    key = (dims, partial, tier)
    found = mesh._layouts.get(key)
    if found is None:
        # Past `__new__`, which reads the paper's arguments, and past the frozen `__setattr__`.
        found = object.__new__(Layout)
        put = object.__setattr__
        put(found, "mesh", mesh)
        put(found, "dims", dims)
        put(found, "partial", partial)
        put(found, "tier", tier)
        put(found, "_hash", hash((mesh._hash, dims, partial, tier)))
        mesh._layouts[key] = found
    return found


def is_even(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether every cut of the layout divides what it cuts, so that all pieces have the same shape.

    >>> is_even(Mesh((2,), ("dp",))("dp"), (4,)), is_even(Mesh((2,), ("dp",))("dp"), (5,))
    (True, False)
    """
    return shards.divides_evenly(layout.mesh, layout.dims, shape)
