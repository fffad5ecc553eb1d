"""Several meshes in one job: apart, overlapping, of some ranks only; each equals one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyperparallel.errors import PlanError
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.runtime.module.step import TrainStep
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import made, numbers

pytestmark = [pytest.mark.procs, pytest.mark.timeout(110)]
BATCHES = [numbers(6, 4, seed=seed) for seed in range(3)]


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.05)


def trained_alone(clip: float | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = made(small.Rows)
    optimizer, losses = adam(list(model.named_parameters())), []
    for x in BATCHES:
        loss = model(x)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained_on(plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    step = TrainStep(made(small.Rows), adam, plan, BATCHES[0], clip=0.5)
    losses = [step.step(x).loss for x in BATCHES]
    held = {}
    for name, p in step.model.named_parameters():
        assert isinstance(p, DTensor)
        held[name] = p.full_tensor().detach()
    return losses, held


def assert_same(found: Any, true: Any) -> None:
    assert found[0] == pytest.approx(true[0], rel=1e-12)
    for name, p in true[1].items():
        torch.testing.assert_close(found[1][name], p, rtol=1e-10, atol=1e-12)


def tp(*ranks: int) -> Plan:
    mesh = Mesh((len(ranks),), ("tp",), ranks)
    return Plan(mesh, {"up.weight": mesh("tp", None)})


@pytest.mark.parametrize(
    "plans",
    [
        [tp(0, 2)],
        [tp(0, 1), Plan(Mesh((2,), ("dp",), (2, 3)), fsdp="dp")],
        [tp(0, 1), Plan(Mesh((2,), ("dp",), (1, 2))), tp(2, 3)],
        [tp(2), Plan(Mesh((3,), ("dp",), (0, 1, 3)))],
    ],
    ids=["some ranks", "apart", "overlapping", "one and three"],
)
def test_meshes_of_some_ranks_train_as_one_device(plans: list[Plan]) -> None:
    true = trained_alone(clip=0.5)

    def run(rank: int) -> list[Any]:
        return [trained_on(plan) for plan in plans if rank in plan.mesh.ranks]

    for rank, found in enumerate(run_ranks(4, run, timeout=100)):
        assert len(found) == sum(rank in plan.mesh.ranks for plan in plans)
        for one in found:
            assert_same(one, true)


def test_a_module_on_some_ranks_and_torchs_own_loop() -> None:
    """Gradients, clipping of DTensors and checkpoints' names work where no other rank takes part."""
    plan = Plan(Mesh((2, 2), ("dp", "tp"), (0, 1, 3, 4)))
    true = trained_alone(clip=0.5)

    def run(rank: int) -> Any:
        if rank == 2:
            with pytest.raises(PlanError, match=r"rank 2 of the job's 5.*write a mesh with ranks="):
                parallelize(made(small.Rows), plan, BATCHES[0])
            return None
        model = parallelize(made(small.Rows), plan, BATCHES[0])
        optimizer, losses = adam(list(model.named_parameters())), []
        for x in BATCHES:
            loss = model(x)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, {n: p.full_tensor().detach() for n, p in model.named_parameters()}  # type: ignore[attr-defined]

    for rank, found in enumerate(run_ranks(5, run, timeout=100)):
        assert (found is None) == (rank == 2)
        if found is not None:
            assert_same(found, true)


def test_train_step_tells_a_rank_that_it_is_not_in_the_mesh() -> None:
    def run(rank: int) -> None:
        if rank == 0:
            with pytest.raises(PlanError, match=r"mesh: got .*ranks=\(1,\)"):
                TrainStep(made(small.Rows), adam, tp(1), BATCHES[0])

    run_ranks(2, run)
