"""Timed work is read back, between timings and beyond them; impossible timings are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperparallel.cluster import Threads
from hyperparallel.cluster.files import cluster_yaml, parse_cluster
from hyperparallel.cluster.presets.laptop import guessed
from hyperparallel.cluster.threads import seconds_at
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure
POINTS = ((1e3, 2e-6), (1e5, 1e-4), (1e6, 3e-3))
THREADS = Threads(
    cores=2, slice_s=4e-3, call_s=1e-6, kernels={"mul": POINTS},
    starts={"all_reduce of 2": POINTS, "all_gather of 2": POINTS, "all_gather of 8": ((1.0, 7e-6),)},
    waits={"all_reduce of 2": POINTS, "all_gather of 2": POINTS, "all_gather of 8": ((1.0, 9e-6),)},
    reuse=((1e5, 1e-11), (1e7, 3e-11)), source="a test",
)  # fmt: skip


@given(st.floats(1.0, 1e9), st.floats(1.0, 1e9))
def test_more_work_never_takes_less(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert seconds_at(POINTS, low) <= seconds_at(POINTS, high) * (1 + 1e-12)


@pytest.mark.parametrize("point", POINTS)
def test_timings_are_read_back(point: tuple[float, float]) -> None:
    assert seconds_at(POINTS, point[0]) == pytest.approx(point[1])
    assert seconds_at(POINTS, 1.0) == 2e-6 and seconds_at(POINTS, 1e7) == pytest.approx(3e-2)


def test_late_accesses_cost_the_difference() -> None:
    far = THREADS.late_seconds(((math.inf, 1e6),), work=1e4)
    assert far == pytest.approx(1e6 * 2e-11)
    assert THREADS.late_seconds(((1e4, 1e6), (1e5, 1e6)), work=1e4) == 0.0  # as near as the timed one
    assert THREADS.late_seconds(((math.inf, 1e6),), work=1e8) == 0.0  # the timed one was as far
    assert replace(THREADS, reuse=()).late_seconds(((math.inf, 1e6),), 1e4) == 0.0


def test_a_collective_costs_what_the_nearest_was_timed_at() -> None:
    assert THREADS.transfer_seconds("all_reduce", 2, 1e3) == pytest.approx((2e-6, 2e-6))
    # moves data, as a gather does
    assert THREADS.transfer_seconds("all_to_all", 6, 1.0) == pytest.approx((7e-6, 9e-6))
    assert THREADS.transfer_seconds("all_reduce", 1, 1e6) == (1e-6, 1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernels": {"mul": ((1e5, 1e-4), (1e3, 2e-6))}}, "kernels.mul"),
        ({"kernels": {"mul": ()}}, "ascending"),
        ({"reuse": ((1.0, -1e-9),)}, "device.threads.reuse"),
        ({"waits": {}}, "the collectives of starts"),
        ({"cores": 0}, "device.threads.cores"),
        ({"slice_s": 5.0}, "5 microseconds"),
    ],
)
def test_impossible_timings_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        replace(THREADS, **change)  # type: ignore[arg-type]


def test_threads_stand_in_a_cluster_file() -> None:
    laptop = guessed()
    cluster = replace(laptop, device=replace(laptop.device, threads=THREADS))
    text = cluster_yaml(cluster)
    assert parse_cluster(text) == cluster
    with pytest.raises(ClusterError, match="slice_s"):
        parse_cluster(text.replace("slice_s", "slice"))
