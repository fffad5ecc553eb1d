"""Comparing timelines: errors by kind and of the step, and where orders part."""

from __future__ import annotations

import math

import pytest

from hyperparallel.simulate import Sample, Span, Timeline, compare

pytestmark = pytest.mark.pure


def timeline(*rows: tuple[str, str, str, float, float], rank: int = 0) -> Timeline:
    return Timeline(
        tuple(Span(name, rank, stream, kind, begin, end) for name, stream, kind, begin, end in rows)
    )


PREDICTED = timeline(
    ("a", "compute", "matmul", 0.0, 2.0),
    ("r", "comm", "all_reduce", 1.0, 3.0),
    ("b", "compute", "norm", 3.0, 4.4),
)
MEASURED = timeline(
    ("a", "compute", "matmul", 0.0, 1.0),
    ("r", "comm", "all_reduce", 1.0, 3.0),
    ("b", "compute", "gelu", 3.0, 4.0),
)


def test_numbers() -> None:
    found = compare(PREDICTED, MEASURED)
    assert found.step_error == pytest.approx(0.1)
    summary = {row.name: (row.predicted, row.measured) for row in found.summary}
    assert summary["step"] == (4.4, 4.0)
    assert summary["masking ratio"] == (0.5, 0.0)
    kinds = {row.name: row for row in found.kinds}
    assert list(kinds) == ["all_reduce", "matmul", "norm", "gelu"]
    assert kinds["matmul"].error == 1.0 and kinds["all_reduce"].error == 0.0
    assert math.isnan(kinds["norm"].error) and kinds["gelu"].error == -1.0
    assert found.disorder == ""


def test_memory_where_both_have_it() -> None:
    assert "peak memory" not in {row.name for row in compare(PREDICTED, MEASURED).summary}
    with_memory = [
        Timeline(t.spans, {0: (Sample(0.0, peak),)}) for t, peak in ((PREDICTED, 3.0), (MEASURED, 2.0))
    ]
    assert compare(*with_memory).summary[-1].error == 0.5


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (timeline(("b", "compute", "x", 0, 1), ("a", "compute", "x", 1, 2)),
         "rank 0, stream compute: action 1 is 'a' predicted and 'b' measured"),
        (timeline(("a", "compute", "x", 0, 1)), "2 actions predicted and 1 measured"),
        (timeline(("a", "compute", "x", 0, 1), rank=4), "no rank in common"),
    ],
)  # fmt: skip
def test_disorder(other: Timeline, said: str) -> None:
    ours = timeline(("a", "compute", "x", 0, 1), ("b", "compute", "x", 1, 2))
    assert said in compare(ours, other).disorder
    assert compare(ours, ours).disorder == ""
