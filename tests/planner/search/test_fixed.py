"""What no strategy of a job's space has is refused; what the search finds, never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hyperparallel.cluster.presets import preset
from hyperparallel.errors import PlanError
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.fixed import VALUES, check_fixed
from hyperparallel.planner.search.search import search
from hyperparallel.planner.search.space import Limits
from hyperparallel.workload.presets import model_preset

pytestmark = pytest.mark.pure


def job(model: str = "qwen3-0.6b", machine: str = "h100") -> PlanningJob:
    return PlanningJob(model_preset(model), preset(machine, 16), 4096, 64)


@pytest.mark.parametrize(
    ("model", "machine"), [("qwen3-0.6b", "h100"), ("deepseek-v2-lite", "atlas950-8192")]
)
def test_fields_of_every_plan_that_is_found_may_be_fixed(model: str, machine: str) -> None:
    one = job(model, machine)
    names = ("tp", "cp", "pp", "dp", "ep", "microbatch", "sp", *VALUES)
    for prediction in search(one, keep=64).best:
        fixed = tuple((name, getattr(prediction.strategy, name)) for name in names)
        check_fixed(one, Limits(fixed=fixed))


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("tp", 3, "tp=2"),
        ("cp", 16, "cp=4"),
        ("pp", 15, "pp=4"),
        ("dp", 32, "dp=16"),
        ("ep", 2, "ep=1"),
        ("microbatch", 3, "microbatch=2"),
        ("virtual", 7, "virtual=6"),
        ("zero", 0, "zero=1"),
        ("schedule", "zb-h3", "schedule=zb-h2"),
        ("recompute", "selective", None),
    ],
)
def test_other_values_are_refused_with_the_nearest(name: str, value: Any, near: str | None) -> None:
    with pytest.raises(PlanError) as caught:
        check_fixed(job(), Limits(fixed=((name, value),)))
    assert caught.value.given == f"{name}={value}" and caught.value.instead == near


def test_offload_needs_a_host() -> None:
    one = job()
    alone = replace(one, cluster=replace(one.cluster, memory=one.cluster.memory[:1]))
    with pytest.raises(PlanError, match="no memory tier named host"):
        check_fixed(alone, Limits(fixed=(("offload", 1.0),)))


def test_what_the_executor_runs_is_all_that_may_be_fixed_for_it() -> None:
    check_fixed(job(), Limits(runnable=True, fixed=(("pp", 1), ("recompute", "none"), ("tp", 2))))
    with pytest.raises(PlanError, match=r"recompute of none .*--runnable"):
        check_fixed(job(), Limits(runnable=True, fixed=(("recompute", "full"),)))
