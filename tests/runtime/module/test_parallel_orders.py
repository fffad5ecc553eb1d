"""Dims cut by several axes in any order, on real ranks: optimizers, clipping, checkpoints, loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.runtime.module.step import TrainStep
from tests.runtime.checkpoint.test_model import load, save
from tests.runtime.module.dense import X, assert_close, assert_same_step, on_ranks, pair, whole
from tests.runtime.module.small import made, numbers

pytestmark = pytest.mark.procs
MESH = Layout((2, 2), ("dp", "tp"))
TP_DP, DP_TP = ("tp", "dp"), ("dp", "tp")


class Wide(nn.Module):
    """Weights of 8 even and 7 uneven rows, and one that is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(4, 8), nn.Linear(8, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.middle(torch.tanh(self.up(x)))))
        return y.pow(2).sum()


PLANS = {
    "one order": {"up.weight": MESH(TP_DP, None)},
    "uneven": {"middle.weight": MESH(TP_DP, None), "middle.bias": MESH(TP_DP)},
    "both dims": {"up.weight": MESH(None, TP_DP), "middle.weight": MESH("tp", "dp")},
    "contradiction": {
        "up.weight": MESH(TP_DP, None), "up.bias": MESH(DP_TP), "middle.weight": MESH(DP_TP, None)
    },
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range, **clip: Any) -> list[Any]:
    found: list[Any] = []
    for seed in seeds:
        loss = model(numbers(5, 4, seed=seed))
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.5, **clip)]
        optimizer.step()
        optimizer.zero_grad()
    return [whole(x) for x in found]


@pytest.mark.parametrize("name", PLANS)
def test_any_order_trains_as_one_device(name: str) -> None:
    def check() -> None:
        for kind, make in OPTIMIZERS.items():
            model, plain = pair(Wide, X, Plan(MESH, PLANS[name]))
            foreach = {"foreach": True} if "foreach" in kind else {}
            got = train(model, make(model.parameters()), range(3), **foreach)
            true = train(plain, make(plain.parameters()), range(3))
            for one, two in zip(got, true, strict=True):
                assert_close(one, two)
            for key, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                assert_close(parameter, plain.get_parameter(key))
            assert len({p.device_mesh for p in model.parameters()}) == 1

    on_ranks(4, check)


def test_the_mesh_is_turned_only_where_it_must_be() -> None:
    def check() -> list[Any]:
        found = []
        for params in ({"up.weight": MESH(DP_TP, None)}, *PLANS.values()):
            weight = parallelize(made(Wide), Plan(MESH, params), X).get_parameter("up.weight")
            assert isinstance(weight, DTensor)
            assert weight.device_mesh["tp"].size() == 2
            found.append((weight.device_mesh.mesh_dim_names, weight.device_mesh.mesh.tolist()))
        return found

    for found in on_ranks(4, check):
        as_is, turned = (DP_TP, [[0, 1], [2, 3]]), (TP_DP, [[0, 2], [1, 3]])
        assert found == [as_is, turned, turned, turned, as_is]


@pytest.mark.parametrize("name", PLANS)
def test_checkpoints_of_any_order(name: str, tmp_path: Path) -> None:
    """torch's own and ours: saved under one plan, loaded under another, with the optimizer."""
    other = Plan(MESH, {"up.weight": MESH("dp", None)}, fsdp="dp")

    def check() -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        rank, plan = torch.distributed.get_rank(), Plan(MESH, PLANS[name])
        plain = made(Wide)
        opt = torch.optim.AdamW(plain.parameters(), lr=0.05)
        train(plain, opt, range(2))
        model = parallelize(made(Wide), plan, X)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, range(2))
        with Checkpointer(tmp_path / "ours", rank=rank, world=4, store=store) as keeper:
            save(keeper, 2, model, optimizer)
        state_dict_saver.save(model.state_dict(), checkpoint_id=tmp_path / "torch")
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        saved = copy.deepcopy(plain.state_dict())
        for key, value in full.items():
            assert isinstance(value, torch.Tensor)
            assert_close(value, saved[key])
        true = train(plain, opt, range(2, 4))
        for target in (other, plan):
            again = parallelize(made(Wide), target, X)
            state = again.state_dict()
            state_dict_loader.load(state, checkpoint_id=tmp_path / "torch")
            for key, value in state.items():
                assert_close(value, saved[key])
            again = parallelize(made(Wide), target, X)
            resumed = torch.optim.AdamW(again.parameters(), lr=0.05)
            with Checkpointer(tmp_path / "ours", rank=rank, world=4, store=store) as keeper:
                load(keeper, again, resumed)
            for one, two in zip(train(again, resumed, range(2, 4)), true, strict=True):
                assert_close(one, two)

    on_ranks(4, check)


@pytest.mark.parametrize("name", PLANS)
def test_whole_weights_load_and_a_step_object_works(name: str) -> None:
    def check() -> None:
        plan = Plan(MESH, PLANS[name])
        model, plain = pair(Wide, X, plan)
        torch.manual_seed(9)
        plain.load_state_dict(Wide().state_dict())
        model.load_state_dict(plain.state_dict())
        assert_same_step(model, plain, X)
        step = TrainStep(made(Wide), lambda n: torch.optim.AdamW([p for _, p in n]), plan, X, clip=0.5)
        dense = made(Wide)
        optimizer = torch.optim.AdamW(dense.parameters())
        for seed in range(3):
            got, true = step(numbers(5, 4, seed=seed)), train(dense, optimizer, range(seed, seed + 1))
            assert got.loss == pytest.approx(float(true[0]), rel=1e-12)
            assert got.grad_norm == pytest.approx(float(true[1]), rel=1e-5)
        for key, parameter in step.model.named_parameters():
            assert_close(parameter, dense.get_parameter(key))

    on_ranks(4, check)


def test_three_axes() -> None:
    """Also one of size 1, and orders that contradict each other in part."""
    mesh, flat = Layout((2, 2, 2), ("dp", "cp", "tp")), Layout((2, 1, 4), ("dp", "cp", "tp"))
    plans = (
        {"up.weight": mesh(("tp", "dp", "cp"), None), "middle.weight": mesh(("tp", "cp"), "dp")},
        {"up.weight": mesh(("cp", "tp", "dp"), None), "up.bias": mesh(("dp", "tp"))},
        {"middle.weight": flat(("tp", "cp", "dp"), None)},
    )

    def check() -> None:
        for params in plans:
            plan = Plan(next(iter(params.values())).mesh, params)
            model, plain = pair(Wide, X, plan)
            make = OPTIMIZERS["AdamW foreach"]
            got = train(model, make(model.parameters()), range(2))
            true = train(plain, make(plain.parameters()), range(2))
            for one, two in zip(got, true, strict=True):
                assert_close(one, two)

    on_ranks(8, check)
