"""Real steps as timelines: the order of actions is the simulator's, and tracing changes nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hyperparallel.cluster import Rates
from hyperparallel.graph.predict.instructions import step_instructions
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.step import TrainStep
from hyperparallel.runtime.module.tracing import gathered, traced_step
from hyperparallel.simulate import Timeline, compare, simulate
from hyperparallel.simulate.rank_tasks import RatePrices, program_tasks
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import integers, made

pytestmark = pytest.mark.procs
DP2, TP2 = Layout((2,), ("dp",)), Layout((2,), ("tp",))
PLANS = {
    "dp": Plan(DP2),
    "zero 3": Plan(DP2, fsdp="dp", zero=3),
    "tp": Plan(TP2, {"head.weight": TP2("tp", None)}),
}
IDS = integers(11, 6, 6)
BATCH = {"ids": IDS, "labels": IDS}


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.1)


def traced(name: str, accumulate: int) -> tuple[Timeline, Timeline]:
    """Predicted and measured timelines of one step on two ranks, from rank 0."""

    def run(rank: int) -> tuple[Timeline, Timeline] | None:
        plan = PLANS[name]
        step = TrainStep(made(small.NextToken), adam, plan, BATCH, accumulate=accumulate, clip=1.0)
        step.step(BATCH)
        _, own = traced_step(step, BATCH)
        whole = gathered(own, step.here, "trace")
        if whole is None:
            return None
        built = step.program.built
        programs = {r: step_instructions(built, r, runs=accumulate) for r in range(2)}
        tasks = program_tasks(programs, RatePrices(Rates()), plan.mesh.group)
        return simulate(tasks), whole

    found = run_ranks(2, run)
    assert found[1] is None
    both: tuple[Timeline, Timeline] = found[0]
    return both


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_predicted_and_measured_do_the_same_in_the_same_order(name: str, accumulate: int) -> None:
    predicted, measured = traced(name, accumulate)
    assert compare(predicted, measured).disorder == ""
    for rank in range(2):
        assert predicted.order(rank) == measured.order(rank)
        kinds = [[s.kind for s in t.streams(rank)["compute"]] for t in (predicted, measured)]
        assert kinds[0] == kinds[1]
    axis = "tp" if name == "tp" else "dp"
    assert set(measured.order(0)) == {"compute", f"comm.{axis}"}
    assert {"matmul", "clip", "update", "wait", "start"} <= set(measured.seconds_by_kind())


def test_measured_spans_make_sense() -> None:
    """From 0 on, one after the other on each stream, ranks of one host on one clock."""
    _, measured = traced("zero 3", 1)
    assert min(span.begin for span in measured.spans) == 0.0
    for rank in range(2):
        for spans in measured.streams(rank).values():
            for before, after in itertools.pairwise(spans):
                assert before.begin <= before.end <= after.begin + 1e-9
    times = measured.times
    assert all(0 < t.busy < measured.step_seconds and t.communication > 0 for t in times.values())
    # Both ranks join each collective: neither can have waited for it before the other had started it.
    starts = {r: [s.begin for s in measured.streams(r)["compute"] if s.kind == "start"] for r in range(2)}
    waits = {r: {s.name: s for s in measured.streams(r)["comm.dp"]} for r in range(2)}
    for rank in range(2):
        for begin, span in zip(starts[1 - rank], waits[rank].values(), strict=True):
            assert span.end >= begin - 1e-6


def test_a_traced_step_is_the_same_step() -> None:
    def run(rank: int) -> tuple[list[float], list[float], bool]:
        losses: list[list[float]] = []
        same = True
        for trace in (False, True):
            step = TrainStep(made(small.NextToken), adam, PLANS["dp"], BATCH, clip=1.0)
            plain = step.program.compiled.function("joint")
            results = [
                traced_step(step, BATCH)[0] if trace and i == 1 else step.step(BATCH) for i in range(3)
            ]
            same &= step.program.compiled.function("joint") is plain  # and nothing stays behind
            same &= not step.optimizer._optimizer_step_pre_hooks
            losses.append([r.loss for r in results] + [r.grad_norm for r in results])
        return losses[0], losses[1], same

    for plain, with_trace, same in run_ranks(2, run):
        assert plain == with_trace and same


def test_one_rank_alone() -> None:
    step = TrainStep(made(small.NextToken), adam, Plan(Layout((1,), ("dp",))), BATCH)
    whole = gathered(traced_step(step, BATCH)[1], step.here, "trace", {"model": "tiny"})
    assert whole is not None and whole.facts == {"model": "tiny"} and whole.source == "measured"
    predicted = simulate(
        program_tasks({0: step_instructions(step.program.built, 0, clip=False)}, RatePrices(Rates()))
    )
    assert predicted.order(0) == whole.order(0)
