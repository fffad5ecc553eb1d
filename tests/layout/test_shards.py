"""Which elements a rank holds: exact tiling, borders of nested cuts, indices there and back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from hyperparallel.layout import Layout, Mesh, is_even
from tests.layout.strategies import cuts

pytestmark = pytest.mark.pure


def chunks(numbers: list[int], count: int) -> list[list[int]]:
    """As torch.chunk, but always `count` pieces: full ones first, then what is left, then none."""
    size = -(-len(numbers) // count)
    return [numbers[i * size : (i + 1) * size] for i in range(count)]


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_slices_tile_the_tensor_exactly(cut: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = cut
    seen = np.zeros(shape, int)
    for rank in layout.mesh.ranks:
        place = layout.slices(shape, rank)
        assert all(0 <= s.start <= s.stop <= n for s, n in zip(place, shape, strict=True))
        assert layout.local_shape(shape, rank) == seen[place].shape
        seen[place] += 1
    copies = layout.mesh.size
    for axis in layout.cut_axes:
        copies //= layout.mesh.axis_size(axis)
    assert (seen == copies).all()


@settings(max_examples=100, deadline=None)
@given(cuts())
def test_nested_cuts_have_the_borders_of_repeated_chunks(
    cut: tuple[Layout, tuple[int, ...]],
) -> None:
    layout, shape = cut
    for rank in layout.mesh.ranks:
        at = layout.mesh.coordinate(rank)
        for size, axes, part in zip(shape, layout.dims, layout.slices(shape, rank), strict=True):
            numbers = list(range(size))
            for axis in axes:
                numbers = chunks(numbers, layout.mesh.axis_size(axis))[at[axis]]
            assert numbers == list(range(size))[part]


@settings(max_examples=100, deadline=None)
@given(cuts())
def test_owners_are_the_ranks_that_hold_an_element(cut: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = cut
    for index in itertools.product(*map(range, shape)):
        owners = dict(layout.owners(shape, index))
        for rank in layout.mesh.ranks:
            local = layout.local_index(shape, rank, index)
            assert owners.get(rank) == local
            if local is not None:
                assert layout.global_index(shape, rank, local) == index


@settings(max_examples=100, deadline=None)
@given(cuts())
def test_the_largest_piece_and_evenness(cut: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = cut
    local = [layout.local_shape(shape, rank) for rank in layout.mesh.ranks]
    assert layout.largest_shape(shape) == tuple(max(d) for d in zip(*local, strict=True))
    # Some cuts of uneven dims still make equal pieces (6 rows in 4 do not, 0 rows do).
    assert len(set(local)) == 1 or not is_even(layout, shape)


def test_five_rows_on_two_ranks() -> None:
    layout = Mesh((2,), ("dp",))("dp", None)
    assert [layout.local_shape((5, 3), rank) for rank in (0, 1)] == [(3, 3), (2, 3)]
    assert layout.owners((5, 3), (3, 1)) == ((1, (0, 1)),)


def test_five_rows_on_four_ranks_leave_one_empty() -> None:
    layout = Mesh((4,), ("dp",))("dp", None)
    assert [layout.local_shape((5, 10), rank)[0] for rank in range(4)] == [2, 2, 1, 0]
    assert layout.slices((5, 10), 3)[0] == slice(5, 5)


def test_order_of_two_axes_on_one_dim_matters() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    dp_first = [mesh(("dp", "tp")).slices((4,), rank)[0].start for rank in range(4)]
    tp_first = [mesh(("tp", "dp")).slices((4,), rank)[0].start for rank in range(4)]
    assert (dp_first, tp_first) == ([0, 1, 2, 3], [0, 2, 1, 3])


def test_rank_list_0_2_1_3() -> None:
    layout = Mesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))("dp", "tp")
    starts = {rank: tuple(s.start for s in layout.slices((4, 4), rank)) for rank in range(4)}
    assert starts == {0: (0, 0), 2: (0, 2), 1: (2, 0), 3: (2, 2)}


@pytest.mark.parametrize("matrix", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("rows", range(1, 10))
def test_two_axes_on_one_uneven_dim(matrix: tuple[int, int], rows: int) -> None:
    layout = Layout(matrix, ("a", "b"), (("a", "b"), None))
    parts = [layout.slices((rows, 3), rank)[0] for rank in range(matrix[0] * matrix[1])]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    assert all(part.stop - part.start == layout.local_shape((rows, 3), rank)[0]
               for rank, part in enumerate(parts))  # fmt: skip
