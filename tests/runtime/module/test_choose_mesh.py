"""plan="auto": the cheapest of all meshes, the same on every rank, within memory, and right."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from hyperparallel.cluster import Rates
from hyperparallel.errors import PlanError, RunError, UserError
from hyperparallel.graph.build import build
from hyperparallel.runtime.module import choose_mesh
from hyperparallel.runtime.module.choose_mesh import automatic_plan, candidates, first_that_fits, meshes
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.runtime.module.step import TrainStep
from tests.runtime.module import small
from tests.runtime.module.dense import assert_close, assert_same_step, on_ranks
from tests.runtime.module.small import made, numbers


class Wide(nn.Module):
    """A few rows through wide layers: cutting the batch is dear, cutting the weights cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 4096, bias=False)
        self.down = nn.Linear(4096, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y.pow(2).sum()


@pytest.mark.fake
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 3), (4, 5), (6, 7), (8, 7)])
def test_every_factorisation_is_tried_once(ranks: int, count: int) -> None:
    found = [dict(zip(p.mesh.names, p.mesh.shape, strict=True)) for p in meshes(ranks)]
    assert len(found) == count and all(p.mesh.size == ranks for p in meshes(ranks))
    assert len({tuple(sizes.items()) for sizes in found}) == count


@pytest.mark.fake
def test_takes_the_cheapest_by_the_integer_programs_own_objective() -> None:
    batch = numbers(8, 4)
    found = candidates(made(small.Rows), 4, (batch,))
    alone = {
        str(plan.mesh): build(made(small.Rows), plan, (batch,), whole_outputs=True).decisions.seconds
        for plan in meshes(4)
    }
    assert {str(c.plan.mesh): c.seconds for c in found} == pytest.approx(alone)
    assert first_that_fits(found, None) == found[0].plan
    assert found[0].seconds == min(alone.values())


@pytest.mark.fake
def test_what_is_dear_decides() -> None:
    slow = Rates(link_bytes_per_second=1e8, latency_seconds=1e-9, flops_per_second=1e12)
    weights = candidates(Wide(), 4, (torch.zeros(4, 256),), rates=slow)[0].plan
    assert "tp" in weights.mesh.names and weights.mesh.axis_size("tp") == 4
    rows = candidates(Wide(), 4, (torch.zeros(65536, 256),), rates=slow)[0].plan
    assert "tp" not in rows.mesh.names


@pytest.mark.fake
def test_memory_bounds_the_choice() -> None:
    found = candidates(Wide(), 4, (torch.zeros(64, 256),))
    least, most = min(c.rank_bytes for c in found), max(c.rank_bytes for c in found)
    assert least < most
    chosen = first_that_fits(found, least)
    assert next(c for c in found if c.plan == chosen).rank_bytes == least
    with pytest.raises(PlanError, match=r"needs .* a rank.*a plan by hand"):
        first_that_fits(found, least - 1)


@pytest.mark.procs
def test_four_ranks_agree_and_do_what_one_does() -> None:
    def check() -> Any:
        model, plain = made(small.Rows), made(small.Rows)
        parallelize(model, "auto", numbers(8, 4))
        for _ in range(2):
            assert_same_step(model, plain, numbers(8, 4))
            model.zero_grad()
            plain.zero_grad()
        return model._parallel.plan.to_yaml()

    plans = on_ranks(4, check)
    assert len(set(plans)) == 1


@pytest.mark.procs
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_whole_step_takes_the_cheapest_mesh_too(accumulate: int) -> None:
    """Against the same steps by one device, with accumulation and clipping."""

    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1)

    def check() -> Any:
        plain = made(small.Rows)
        one = sgd(list(plain.named_parameters()))
        step = TrainStep(made(small.Rows), sgd, "auto", numbers(8, 4), accumulate=accumulate, clip=0.5)
        for _ in range(2):
            result, loss = step(numbers(8, 4)), plain(numbers(8, 4))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            one.step()
            one.zero_grad()
            assert result.loss == pytest.approx(loss.item())
            assert result.grad_norm == pytest.approx(norm.item())
        for name, value in plain.named_parameters():
            assert_close(step.model.get_parameter(name), value)
        return step.state.plan.to_yaml()

    plans = on_ranks(4, check)
    assert len(set(plans)) == 1


@pytest.mark.procs
def test_an_error_of_the_first_rank_is_every_ranks() -> None:
    """One that a user meets as it is, one that does not pickle as its words; no rank waits for an answer."""

    class Graph(Exception):
        def __init__(self) -> None:
            super().__init__("at a node")
            self.frame = sys._getframe()

    def fails(*args: Any, **how: Any) -> Any:
        raise Graph

    def check() -> tuple[str, str]:
        with pytest.raises(PlanError, match=r"needs .* a rank.*a plan by hand") as first:
            automatic_plan(small.Rows(), (numbers(8, 4),), memory_bytes=1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choose_mesh, "candidates", fails)
            with pytest.raises(RunError, match="rank 0 found no mesh: Graph: at a node") as second:
                automatic_plan(small.Rows(), (numbers(8, 4),))
        return str(first.value), str(second.value)

    one, other = on_ranks(2, check)
    assert one == other


@pytest.mark.procs
def test_mistakes_reach_every_rank() -> None:
    def check() -> None:
        with pytest.raises(UserError, match=r'a Plan or "auto"'):
            parallelize(made(small.Rows), "automatic", numbers(8, 4))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"torch.nn.Module"):
            parallelize(len, "auto", numbers(8, 4))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r'a Plan or "auto"'):
            TrainStep(made(small.Rows), torch.optim.SGD, "automatic", numbers(8, 4))  # type: ignore[arg-type]

    on_ranks(2, check)
