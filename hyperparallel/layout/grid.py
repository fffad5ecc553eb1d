"""A grid: ranks whose coordinates have names, the arithmetic under a `Mesh`.

A grid is a value: a shape, one name per axis, and the ranks in row-major order of their coordinates
(last axis fastest). The rank list may be any list of different ranks, so a grid can be a slice of a
larger one, or place neighbours of an axis on neighbouring devices.

What it leaves out: tensors (`layout.py`, where `Mesh` is a grid that makes layouts), which links an
axis crosses (`cluster/`) and process groups (`runtime/`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from hyperparallel.errors import LayoutError, nearest


class Grid:
    """Ranks in a named grid, frozen.

    shape: number of ranks along each axis; names: one per axis; ranks: row-major, 0..size-1 if not
    given. Raises LayoutError for sizes below one, repeated names, or a rank list of another length.

    >>> grid = Grid((2, 2), ("dp", "tp"))
    >>> grid.coordinate(3), grid.group(3, "dp")
    ({'dp': 1, 'tp': 1}, (1, 3))
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    size: int

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None = None
    ) -> None:
        # One name is no sequence of letters.
        names = (names,) if isinstance(names, str) else names
        shape, names = _listed("device_matrix", shape), _listed("alias_name", names)
        size = _check_grid(shape, names)
        ranks = tuple(range(size)) if ranks is None else _listed("ranks", ranks)
        _check_ranks(ranks, shape, size)
        fields = {"shape": shape, "names": names, "ranks": ranks, "size": size}
        sizes = dict(zip(names, shape, strict=True))
        key = hash((shape, names, ranks))
        self.__dict__.update(fields, _sizes=sizes, _hash=key)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} is frozen; build a new one to change {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} is frozen; {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Grid) or self._hash != other._hash:
            return False
        mine, theirs = (self.shape, self.names, self.ranks), (other.shape, other.names, other.ranks)
        return mine == theirs

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Grid], tuple[object, ...]]:
        return type(self), (self.shape, self.names, self.ranks)

    def __repr__(self) -> str:
        names = ", ".join(f'"{name}"' for name in self.names) + ("," if len(self.names) == 1 else "")
        ranks = "" if self.ranks == tuple(range(self.size)) else f", ranks={self.ranks}"
        return f"{type(self).__name__}({self.shape}, ({names}){ranks})"

    def axis_size(self, name: str) -> int:
        """The number of ranks along one axis; LayoutError if there is no such axis."""
        size = self._sizes.get(name)
        return size if size is not None else self._unknown(name)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands: its index along every axis."""
        return dict(zip(self.names, self.indices(rank), strict=True))

    def indices(self, rank: int) -> tuple[int, ...]:
        """The coordinate as plain numbers in axis order.

        >>> Grid((2, 2), ("dp", "tp"), (0, 2, 1, 3)).indices(2)
        (0, 1)
        """
        found = self._indices.get(rank)
        if found is None:
            raise LayoutError("rank", rank, f"a rank of {self}: {_some(self.ranks)}")
        return found

    def rank_at(self, **coordinate: int) -> int:
        """The rank at a coordinate; every axis longer than one must be given.

        >>> Grid((2, 2), ("dp", "tp")).rank_at(dp=1, tp=0)
        2
        """
        for name in coordinate:
            self.axis_size(name)
        position = 0
        for name, size in zip(self.names, self.shape, strict=True):
            if name not in coordinate and size > 1:
                raise LayoutError("coordinate", coordinate, "an index for each of its axes", name)
            index = coordinate.get(name, 0)
            if not 0 <= index < size:
                raise LayoutError(f"coordinate {name}", index, f"0 to {size - 1}")
            # Row-major, as numpy and DeviceMesh count: the last axis fastest.
            position = position * size + index
        return self.ranks[position]

    def group(self, rank: int, axes: str | Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, row-major in the order of `axes`.

        >>> Grid((2, 2), ("dp", "tp")).group(0, ("tp", "dp"))
        (0, 2, 1, 3)
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        indices = list(self.indices(rank))
        places = [self.axis_index(axis) for axis in axes]
        if len(set(places)) != len(places):
            raise LayoutError("axes", axes, "each axis once")
        # Row-major in the order asked for: pieces gathered in this order join to the dim that those axes cut.
        members = []
        for choice in itertools.product(*(range(self.shape[place]) for place in places)):
            for place, index in zip(places, choice, strict=True):
                indices[place] = index
            position = sum(i * stride for i, stride in zip(indices, self._strides, strict=True))
            members.append(self.ranks[position])
        return tuple(members)

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`; together they hold every rank once.

        >>> Grid((2, 2), ("dp", "tp")).groups("dp")
        ((0, 2), (1, 3))
        """
        seen: set[int] = set()
        found = []
        for rank in self.ranks:
            if rank not in seen:
                found.append(self.group(rank, axes))
                seen.update(found[-1])
        return tuple(found)

    def axis_index(self, name: str) -> int:
        """The place of an axis in `names`."""
        return self._places[name] if name in self._places else self._unknown(name)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    @cached_property
    def _indices(self) -> dict[int, tuple[int, ...]]:
        grid = itertools.product(*map(range, self.shape))
        return dict(zip(self.ranks, grid, strict=True))

    def _unknown(self, name: object) -> int:
        known = ", ".join(self.names) or "no axis at all"
        raise LayoutError("axis", name, f"one of {known}", nearest(str(name), self.names))

    # Set in __init__ behind the frozen __setattr__.
    _sizes: dict[str, int]
    _hash: int


MOST_RANKS = 1 << 24
"""The largest grid: its ranks are listed, and no machine has as many."""


def _listed(field: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Iterable):
        raise LayoutError(field, given, "a sequence, one entry per axis", f"({given!r},)")
    return tuple(given)


def _check_grid(shape: tuple[int, ...], names: tuple[str, ...]) -> int:
    if len(shape) != len(names):
        raise LayoutError("alias_name", names, f"one name per entry of the device matrix {shape}")
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in shape):
        raise LayoutError("device_matrix", shape, "whole numbers of at least 1")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name == "None":
            raise LayoutError("alias_name", name, "a name like dp: letters, digits, underscores")
    if len(set(names)) != len(names):
        raise LayoutError("alias_name", names, "each name once")
    size = math.prod(shape)
    if size > MOST_RANKS:
        raise LayoutError("device_matrix", shape, f"at most {MOST_RANKS} ranks together")
    return size


def _check_ranks(ranks: tuple[int, ...], shape: tuple[int, ...], size: int) -> None:
    if len(ranks) != size:
        raise LayoutError(
            "ranks",
            _some(ranks),
            f"{size} ranks, the product of the device matrix {shape}",
            f"a device matrix whose product is {len(ranks)}",
        )
    if len(set(ranks)) != len(ranks) or any(not isinstance(r, int) or r < 0 for r in ranks):
        raise LayoutError("ranks", _some(ranks), "different whole numbers from 0 up")


def _some(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"({shown}, ... {len(ranks)} in all)" if len(ranks) > 8 else f"({shown})"
