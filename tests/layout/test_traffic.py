"""What a rank must receive: closed forms against every rank looked at alone."""

from __future__ import annotations

import itertools
import random

import pytest

from hyperparallel.layout.traffic import Dims, Traffic

pytestmark = pytest.mark.pure
MESHES = ((2, 4, 2, 4), (4, 4, 4), (8, 8), (3, 2, 5), (5, 7), (2, 3, 4, 2))


def interval(size: int, axes: tuple[str, ...], sizes: dict[str, int], at: dict[str, int]) -> tuple[int, int]:
    start, stop = 0, size
    for axis in axes:
        piece = -((start - stop) // sizes[axis])
        start = min(start + at[axis] * piece, stop)
        stop = min(start + piece, stop)
    return start, stop


def by_rank(sizes: dict[str, int], shape: tuple[int, ...], src: Dims, dst: Dims) -> int:
    """The most that any rank lacks, by definition."""
    most = 0
    for index in itertools.product(*map(range, sizes.values())):
        at = dict(zip(sizes, index, strict=True))
        wanted = overlap = 1
        for size, old, new in zip(shape, src, dst, strict=True):
            (low, high), (start, stop) = (interval(size, axes, sizes, at) for axes in (old, new))
            wanted *= stop - start
            overlap *= max(min(stop, high) - max(start, low), 0)
        most = max(most, wanted - overlap)
    return most


def random_dims(draw: random.Random, axes: list[str], ndim: int) -> Dims:
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw.sample(axes, k=len(axes)):
        place = draw.randrange(ndim + 1)
        if place < ndim:
            dims[place].append(axis)
    return tuple(map(tuple, dims))


@pytest.mark.parametrize("seed", range(8))
def test_closed_forms_say_what_every_rank_says(seed: int) -> None:
    """Also where pieces are empty, dims have no elements, and axes move between dims."""
    draw = random.Random(seed)
    closed = 0
    for _ in range(120):
        sizes = dict(zip("abcd", draw.choice(MESHES), strict=False))
        ndim, largest = draw.randint(1, 4), draw.choice((12, 60))
        shape = tuple(draw.randrange(largest) for _ in range(ndim))
        src, dst = (random_dims(draw, list(sizes), ndim) for _ in range(2))
        traffic, true = Traffic(sizes, shape), by_rank(sizes, shape, src, dst)
        assert traffic.missing(src, dst) == true, (sizes, shape, src, dst)
        assert traffic.at_least(src, traffic.lengths(dst)) <= true
        assert traffic._any_pieces(src, dst) == true
        closed += traffic._apart(src, dst) is not None
    assert closed > 40
