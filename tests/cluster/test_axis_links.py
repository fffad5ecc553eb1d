"""Axes laid over fabric dimensions: sizes multiply, and agree with groups of numbered devices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.cluster import Cluster, Device, Fabric, Tier
from hyperparallel.cluster.axis_links import FILLS, Fill, placed, spans, tier_spans
from hyperparallel.cluster.presets import preset

pytestmark = pytest.mark.pure


def machine(sizes: list[tuple[int, ...]]) -> Cluster:
    fabric = tuple(Fabric(f"t{i}", "mesh", size, 1e11, 1e-6) for i, size in enumerate(sizes))
    return Cluster("m", Device("d", {"bf16": 1e14}, 1e12), (Tier("device", 8e10, 1e12, 1e12),), fabric)


def numbered(dims: tuple[int, ...], axes: list[int], axis: int) -> list[int]:
    """Distinct coordinates per dimension of the first group of `axis`, devices numbered innermost first."""
    stride = math.prod(axes[:axis])
    group = [member * stride for member in range(axes[axis])]
    result, inner = [], 1
    for size in dims:
        result.append(len({device // inner % size for device in group}))
        inner *= size
    return result


POWERS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(deadline=None)
@given(dims=POWERS, cuts=st.lists(st.integers(0, 20), max_size=4))
def test_powers_of_two_are_placed_as_numbered_devices_are(dims: list[int], cuts: list[int]) -> None:
    sizes = tuple(2**power for power in dims)
    total = sum(dims)
    borders = [0, *sorted(min(cut, total) for cut in cuts), total]
    axes = [2 ** (high - low) for low, high in itertools.pairwise(borders)]
    placed = spans(machine([sizes]), axes)[:, :, 0]
    for axis in range(len(axes)):
        assert placed[axis].tolist() == numbered(sizes, axes, axis)


@pytest.mark.parametrize("fill", FILLS)
@settings(deadline=None)
@given(dims=st.lists(st.integers(1, 30), min_size=1, max_size=4), data=st.data())
def test_axes_that_multiply_to_all_devices_fill_every_dimension(
    fill: Fill, dims: list[int], data: st.DataObject
) -> None:
    """Whatever the factors: the product over dims is the axis, the product over axes is the dim."""
    rest, axes = math.prod(dims), []
    for _ in range(3):
        axes.append(data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= axes[-1]
    axes.append(rest)
    placed = spans(machine([tuple(dims)]), axes, fill)[:, :, 0]
    assert placed.prod(axis=1).tolist() == axes
    assert placed.prod(axis=0).tolist() == dims


def test_many_candidates_are_placed_like_each_alone() -> None:
    cluster = preset("ub-mesh-8192")
    random = np.random.default_rng(3)
    sizes = [2 ** random.integers(0, 5, 200) for _ in range(4)]
    together = spans(cluster, sizes)
    assert together.shape == (4, 5, 200)
    for index in range(0, 200, 17):
        alone = spans(cluster, [int(size[index]) for size in sizes])
        assert (alone[:, :, 0] == together[:, :, index]).all()


def test_numbers_and_arrays_mix() -> None:
    placed = spans(preset("h100", 64), [8, np.array([2, 4, 8])])
    assert placed[1].tolist() == [[1, 1, 1], [2, 4, 8]]


def test_tiers_multiply_their_dimensions() -> None:
    cluster = preset("ub-mesh-8192")
    assert tier_spans(cluster, [16, 16, 32])[:, :, 0].tolist() == [[16, 1, 1], [4, 4, 1], [1, 4, 8]]


def test_an_axis_that_does_not_divide_crosses_the_next_tier() -> None:
    placed = spans(preset("h100", 24), [6, 4])[:, :, 0]
    assert placed.tolist() == [[2, 3], [4, 1]]


def test_what_no_dimension_has_counts_at_the_outermost() -> None:
    assert spans(preset("h100", 8), [3])[:, :, 0].tolist() == [[1, 3]]


def test_no_axes_and_no_fabric() -> None:
    assert spans(preset("h100"), []).shape == (0, 2, 1)
    assert spans(machine([]), [4])[:, :, 0].tolist() == [[4]]
    assert tier_spans(machine([]), [4])[:, :, 0].tolist() == [[4]]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("axes", [[4, 8, 2], [2, 2, 16], [8, 8, 1], [3, 4, 2]])
def test_members_and_strides_number_every_device_once(fill: Fill, axes: list[int]) -> None:
    """Coordinates member * stride of all axes reach each point of the mesh exactly once."""
    sizes = (8, 8) if math.prod(axes) == 64 else (6, 4)
    found = placed(machine([sizes]), axes, fill)
    for dim, width in enumerate(sizes):
        parts = zip(found.members[:, dim, 0].tolist(), found.strides[:, dim, 0].tolist(), strict=True)
        steps = [[member * stride for member in range(members)] for members, stride in parts]
        assert sorted(sum(one) for one in itertools.product(*steps)) == list(range(width))
