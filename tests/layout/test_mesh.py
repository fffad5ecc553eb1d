"""Meshes: coordinates, groups, and other meshes over the same ranks."""

from __future__ import annotations

import copy
import pickle

import pytest

from hyperparallel.errors import LayoutError
from hyperparallel.layout import Mesh

pytestmark = pytest.mark.pure
CUBE = Mesh((2, 3, 2), ("a", "b", "c"), (3, 1, 2, 0, 4, 5, 11, 10, 9, 8, 7, 6))


def test_rank_and_coordinate_are_inverse() -> None:
    assert sorted(CUBE.rank_at(**CUBE.coordinate(rank)) for rank in CUBE.ranks) == list(range(12))
    assert all(CUBE.rank_at(**CUBE.coordinate(rank)) == rank for rank in CUBE.ranks)


@pytest.mark.parametrize("axes", [("a",), ("b", "a"), ("c", "a", "b"), ()])
def test_groups_hold_each_rank_once_in_the_order_of_the_axes(axes: tuple[str, ...]) -> None:
    groups = CUBE.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(12))
    for group in groups:
        places = [tuple(CUBE.coordinate(rank)[axis] for axis in axes) for rank in group]
        assert places == sorted(places) and len(set(places)) == len(places)
        assert all(CUBE.group(rank, axes) == group for rank in group)


def test_permuted_rank_list() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))
    assert mesh.group(0, "tp") == (0, 2)
    assert mesh.group(0, "dp") == (0, 1)
    assert mesh != Mesh((2, 2), ("dp", "tp"))


def test_slice_takes_the_ranks_at_an_index_or_in_a_range() -> None:
    part = CUBE.slice(b=1, a=slice(1, 2))
    assert (part.shape, part.names) == ((1, 2), ("a", "c"))
    assert part.ranks == tuple(CUBE.rank_at(a=1, b=1, c=c) for c in range(2))


def test_flatten_undoes_split_and_keeps_coordinates() -> None:
    split = Mesh((12,), ("w",), CUBE.ranks).split("w", {"a": 2, "b": 3, "c": 2})
    assert split == CUBE
    assert split.flatten(("a", "b", "c"), "w") == Mesh((12,), ("w",), CUBE.ranks)
    flat = CUBE.flatten(("c", "a"), "ca")
    assert (flat.names, flat.shape) == (("b", "ca"), (3, 4))
    for rank in CUBE.ranks:
        at = CUBE.coordinate(rank)
        assert flat.coordinate(rank) == {"b": at["b"], "ca": at["c"] * 2 + at["a"]}


def test_rename_changes_names_only() -> None:
    assert CUBE.rename({"b": "z"}) == Mesh(CUBE.shape, ("a", "z", "c"), CUBE.ranks)


def test_a_mesh_is_frozen_and_survives_copies() -> None:
    with pytest.raises(AttributeError, match="frozen"):
        CUBE.shape = (12,)
    assert pickle.loads(pickle.dumps(CUBE)) == CUBE == copy.deepcopy(CUBE)
    assert hash(pickle.loads(pickle.dumps(CUBE))) == hash(CUBE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh((2, 2), ("dp", "tp"), (0, 1, 2)), "ranks.*4 ranks, the product"),
        (lambda: Mesh((2,), ("dp",), (1, 1)), "ranks.*different"),
        (lambda: Mesh((2, 2), ("dp",)), "alias_name.*one name per entry"),
        (lambda: Mesh((2, 2), ("dp", "dp")), "alias_name.*each name once"),
        (lambda: Mesh((0,), ("dp",)), "device_matrix.*at least 1"),
        (lambda: Mesh((2,), ("None",)), "alias_name.*a name like dp"),
        (lambda: Mesh(2, ("dp",)), r"device_matrix: got 2; allowed: a sequence.*write \(2,\)"),  # type: ignore[arg-type]
        (lambda: Mesh((2,), 3), "alias_name: got 3; allowed: a sequence"),  # type: ignore[arg-type]
        (lambda: Mesh((2,), ("dp",), 2), "ranks: got 2; allowed: a sequence"),  # type: ignore[arg-type]
        (lambda: Mesh((1 << 20, 1 << 20), ("dp", "tp")), "device_matrix.*at most 16777216 ranks"),
        (lambda: CUBE.group(0, "aa"), "axis: got 'aa'.*one of a, b, c; write a instead"),
        (lambda: CUBE.group(0, ("a", "a")), "axes.*each axis once"),
        (lambda: CUBE.coordinate(12), "rank: got 12"),
        (lambda: CUBE.rank_at(a=0, b=3, c=0), "coordinate b: got 3; allowed: 0 to 2"),
        (lambda: CUBE.rank_at(a=0), "coordinate.*write b instead"),
        (lambda: CUBE.slice(b=3), "slice of b"),
        (lambda: CUBE.slice(b=slice(3, 3)), "slice of b.*keeps some"),
        (lambda: CUBE.split("b", {"x": 2}), "split of b.*product is 3"),
        (lambda: CUBE.flatten(("a", "a"), "z"), "flatten"),
        (lambda: CUBE.rename({"z": "y"}), "axis: got 'z'"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()  # type: ignore[operator]
