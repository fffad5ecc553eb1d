"""A traced run keeps the step of median length, the same one on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.module.step import StepResult, TrainStep
from hyperparallel.simulate.timeline import COMPUTE, Span, Timeline
from hyperparallel.simulate.trace import read_trace
from hyperparallel.train import tracing
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import integers, made

SLOW = {6: 3.0, 7: 5.0, 8: 9.0, 9: 4.0, 10: 1.0}
"""Seconds of a call on the rank that is slow in it; the other takes half a second."""


def run(rank: int, calls: int, path: Path) -> None:
    def traced_step(step: TrainStep, batch: torch.Tensor) -> tuple[StepResult, Timeline]:
        seconds = SLOW.get(steps.calls, 2.0) if steps.calls % 2 == rank else 0.5
        result = step.step(batch)
        return result, Timeline(
            (Span(f"call {steps.calls}", rank, COMPUTE, "x", 0.0, seconds),), source="measured"
        )

    ids = integers(11, 6, 6)
    batch = {"ids": ids, "labels": ids}
    step = TrainStep(
        made(small.NextToken), lambda named: torch.optim.SGD(named), Plan(Mesh((2,), ("dp",))), batch
    )
    steps = tracing.TracedSteps(step, path, {"model": "tiny"})
    tracing.traced_step = traced_step  # type: ignore[assignment]
    for _ in range(calls):
        steps.step(batch)


@pytest.mark.procs
@pytest.mark.parametrize(
    "calls, chosen, said",
    [
        (2, 1, "1"),
        (5, 3, "3"),
        (8, 6, "6"),
        (12, 9, "9 of 6 to 10, the median"),
    ],
)
def test_the_median_of_five_calls_is_written(calls: int, chosen: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    run_ranks(2, run, calls, path)
    whole = read_trace(path)
    assert {span.name for span in whole.spans} == {f"call {chosen}"} and whole.ranks == (0, 1)
    assert whole.facts["call"] == said
