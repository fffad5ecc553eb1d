"""The numbers read off a timeline, against a grid of moments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperparallel.simulate import Span, Timeline

pytestmark = pytest.mark.pure


def test_shares_add_up() -> None:
    timeline = Timeline(
        (
            Span("mm", 0, "compute", "matmul", 0.0, 4.0),
            Span("ar wait", 0, "compute", "wait", 4.0, 6.0),
            Span("ar", 0, "comm", "all_reduce", 3.0, 6.0),
            Span("mm", 1, "compute", "matmul", 0.0, 10.0),
        )
    )
    assert timeline.step_seconds == 10.0
    zero = timeline.times[0]
    assert (zero.busy, zero.communication, zero.exposed, zero.bubble) == (4.0, 3.0, 2.0, 4.0)
    assert timeline.busy_share == 0.7 and timeline.exposed_share == 0.1 and timeline.bubble_share == 0.2
    assert timeline.masking_ratio == pytest.approx(1 / 3)
    assert timeline.seconds_by_kind() == {"matmul": 7.0, "all_reduce": 1.5, "wait": 1.0}
    assert timeline.order(0) == {"comm": ["ar"], "compute": ["mm", "ar wait"]}


def test_an_empty_timeline() -> None:
    empty = Timeline(())
    assert empty.step_seconds == empty.busy_share == empty.bubble_share == empty.peak_bytes() == 0.0
    assert empty.masking_ratio == 1.0 and empty.seconds_by_kind() == {}


spans = st.builds(
    lambda rank, stream, kind, begin, lasts: Span("s", rank, stream, kind, begin, begin + lasts),
    st.integers(0, 1),
    st.sampled_from(["compute", "compute.2", "comm", "copy.in"]),
    st.sampled_from(["matmul", "wait"]),
    st.integers(0, 20).map(float),
    st.integers(0, 8).map(float),
)


@given(st.lists(spans, min_size=1, max_size=12))
def test_parts_against_a_grid(found: list[Span]) -> None:
    timeline = Timeline(tuple(found))
    first = min(span.begin for span in found)
    for rank in timeline.ranks:
        busy = moving = exposed = 0
        for i in range(int(timeline.step_seconds)):
            at = first + i + 0.5
            here = [s for s in found if s.rank == rank and s.begin < at < s.end]
            works = any(s.stream.startswith("compute") and s.kind != "wait" for s in here)
            moves = any(not s.stream.startswith("compute") for s in here)
            busy, moving, exposed = busy + works, moving + moves, exposed + (moves and not works)
        times = timeline.times[rank]
        assert (times.busy, times.communication, times.exposed) == (busy, moving, exposed)
        assert times.bubble == pytest.approx(timeline.step_seconds - busy - exposed)
