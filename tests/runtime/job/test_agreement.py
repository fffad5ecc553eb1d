"""Ranks that decided differently say so on all ranks, before they run; nothing hangs."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from hyperparallel.errors import RunError
from hyperparallel.graph import build as build_module
from hyperparallel.graph import decided
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.job import agreement
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.runtime.module.step import TrainStep
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import made, numbers

pytestmark = [pytest.mark.procs, pytest.mark.timeout(100)]
TP2, DP2 = Layout((2,), ("tp",)), Layout((2,), ("dp",))
X = numbers(4, 4)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def error_of(run: Any) -> str:
    with pytest.raises(RunError) as caught:
        run()
    return str(caught.value)


def solved_otherwise(rank: int) -> None:
    """Rank 1's solver gives the answer of another declaration, as one that ran out of time might."""
    if rank == 1:
        solve = build_module.decide

        def decide(work: Any, rules: Any, plan: Plan, *more: Any, **how: Any) -> Any:
            declared = replace(plan, params={"up.weight": plan.mesh("tp", None)})
            return replace(solve(work, rules, declared, *more, **how), plan=plan)

        build_module.decide = decide  # type: ignore[assignment]


@pytest.mark.parametrize("door", ["parallelize", "TrainStep"])
def test_a_rank_that_solved_otherwise_is_found_before_anything_runs(door: str) -> None:
    plan = Plan(TP2, {"up.weight": TP2(None, None)})

    def run(rank: int) -> str:
        solved_otherwise(rank)
        model = made(small.Rows)
        if door == "parallelize":
            return error_of(lambda: parallelize(model, plan, X))
        return error_of(lambda: TrainStep(model, sgd, plan, X))

    first, second = run_ranks(2, run)
    assert first == second
    assert "the first decision that differs is op up (aten." in first
    assert "on rank 0" in first and "tp cuts" in first.partition("on rank 0")[2]


class Scaled(small.Rows):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def otherwise(what: str, rank: int) -> tuple[nn.Module, Plan, torch.Tensor, bool]:
    model, plan, x, compiled = made(small.Rows), Plan(DP2), X, False
    if what == "number":
        model = made(Scaled, 2.0)
    if rank == 1:
        match what:
            case "plan":
                plan = Plan(DP2, fsdp="dp")
            case "batch":
                x = numbers(6, 4)
            case "model":
                model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            case "width":  # the same ops on weights of another shape
                model.up, model.down = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
            case "frozen":
                model.get_parameter("up.bias").requires_grad_(False)
            case "number":  # the same ops with another number
                model = made(Scaled, 3.0)
            case "option":
                compiled = True
            case "version":
                torch.__version__ = "0.0"
    return model, plan, x, compiled


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plan", "plan, fsdp: None on rank 0, dp on rank 1"),
        ("batch", "batch, x: float64 of shape [4, 4] on rank 0, float64 of shape [6, 4] on rank 1"),
        ("model", "batch, x: float64 of shape [4, 4] on rank 0, batch, input: float64"),
        ("width", "parameter up.weight: float64 of shape [6, 4], trained on rank 0, float64 of shape [5, 4]"),
        ("frozen", "parameter up.bias: float64 of shape [6], trained on rank 0, float64 of shape [6], not"),
        ("number", ", 2.0) -> float64[] in the model itself on rank 0, aten.mul.Tensor(sum_1, 3.0)"),
        ("option", "option compile: False on rank 0, True on rank 1"),
        ("version", f"version of torch: {torch.__version__} on rank 0, 0.0 on rank 1"),
    ],
)
def test_every_kind_of_difference_is_named(what: str, words: str) -> None:
    def run(rank: int) -> str:
        model, plan, x, compiled = otherwise(what, rank)
        return error_of(lambda: parallelize(model, plan, x, compile=compiled))

    first, second = run_ranks(2, run)
    assert first == second and words in first


def test_programs_of_new_shapes_are_agreed_on_too() -> None:
    """Both build for a new shape, but not the same one."""

    def run(rank: int) -> str:
        step = TrainStep(made(small.Rows), sgd, Plan(DP2), X)
        step.step(X)
        step.step(numbers(6, 4))  # equal on both: built and run
        return error_of(lambda: step.step(numbers(8 if rank else 2, 4)))

    first, second = run_ranks(2, run)
    assert first == second and "batch, x: float64 of shape [2, 4] on rank 0, float64 of shape [8, 4]" in first


@pytest.mark.parametrize(("transport", "seconds"), [("auto", 100), ("messages", 12)])
def test_a_rank_with_a_shape_that_it_knows_does_not_wait_for_one_that_builds(
    transport: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits in a collective for rank 0, which waits for it in a meeting: through shared memory that
    is seen long before the deadline, over gloo at the deadline."""
    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", transport)

    def run(session: Session) -> None:
        step = TrainStep(made(small.Rows), sgd, Plan(DP2), X)
        step.step(X)
        with session.step(1):
            step.step(X if session.rank else numbers(2, 4))

    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        launch(run, 2, threads=1, collective_timeout=timedelta(seconds=seconds))
    assert time.monotonic() - began < 40
    text = str(caught.value)
    assert text.startswith("rank 1 failed in step 1:")
    assert re.search("deadlock: .*rank 0 waits for rank 1 to agree on the program of .*global batch", text)


def test_who_does_not_come_to_agree_is_named_at_the_deadline() -> None:
    """Rank 1 is in no collective either."""

    def run(session: Session) -> None:
        step = TrainStep(made(small.Rows), sgd, Plan(DP2), X)
        if session.rank:
            time.sleep(30)
        step.step(numbers(2, 4))

    with pytest.raises(RunError, match=r"rank 1 did not come within 3 s to agree on the program .*batch"):
        launch(run, 2, threads=1, collective_timeout=timedelta(seconds=3), grace=0.5)


def test_ranks_of_two_meshes_agree_apart() -> None:
    """Ranks outside a mesh take no part; more than two ranks are grouped by what they decided."""

    def run(rank: int) -> str:
        mesh = Mesh((3,), ("dp",), ranks=(0, 1, 3))
        if rank == 2:
            return ""
        here = Here.in_job(mesh)
        agreement.agree(here, [("a", "same")], "one thing")
        mine = [("a", "same"), ("b", "whole" if rank == 1 else "cut")]
        return error_of(lambda: agreement.agree(here, mine, "another"))

    found = run_ranks(4, run)
    assert found[2] == "" and len(set(found)) == 2
    assert "another: the first decision that differs is b: cut on ranks 0, 3, whole on rank 1;" in found[0]


def test_what_is_compared_names_what_ranks_share_and_nothing_of_one_rank() -> None:
    """All ranks of one build list the same decisions, though their pieces and offsets differ."""
    built = build_module.build(made(small.Rows), Plan(Layout((2, 2), ("dp", "tp"))), (numbers(5, 4),))
    lists = [decided.decisions(built, built.rank_program(rank), {}) for rank in range(4)]
    assert all(each == lists[0] for each in lists)
    assert len({label for label, _ in lists[0]}) > 40


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ({"lr": 0.2}, "lr of up.weight: 0.1 on rank 0, 0.2 on rank 1"),
        ({"clip": 1.0}, "option clip: None on rank 0, 1.0 on rank 1"),
        ({"kind": torch.optim.Adagrad}, "optimizer: SGD on rank 0, Adagrad on rank 1"),
    ],
)
def test_ranks_that_would_update_otherwise_are_found(mine: dict[str, Any], words: str) -> None:
    def run(rank: int) -> str:
        how = mine if rank else {}
        make = how.get("kind", torch.optim.SGD)
        lr, clip = how.get("lr", 0.1), how.get("clip")
        return error_of(
            lambda: TrainStep(made(small.Rows), lambda named: make(named, lr=lr), Plan(DP2), X, clip=clip)
        )

    first, second = run_ranks(2, run)
    assert first == second and f"the update of a step: the first decision that differs is {words}" in first
