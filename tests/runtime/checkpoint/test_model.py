"""Modules, optimizers and generators through a checkpoint, on one rank and on DTensors."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hyperparallel.errors import CheckpointError, RunError
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.checkpoint.model import (
    empty_random_state,
    module_parameters,
    module_state,
    optimizer_state,
    prepare_optimizer,
    random_state,
    restore_random_state,
    restore_settings,
)
from hyperparallel.runtime.checkpoint.storage import CheckpointWriter
from tests.ranks import run_ranks


class Odd(nn.Module):
    """Sizes that do not divide, a tie, a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(21.0).view(7, 3) / 10)
        self.b = nn.Parameter(torch.arange(5.0))
        self.one = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.tied = self.w
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("table", torch.ones(3), persistent=False)


def step(module: Odd, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step whose gradients depend on the element and the number alone."""
    for parameter in module.parameters():
        ramp = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        grad = torch.sin(ramp + number)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad
    optimizer.step()


def shard(module: Odd, world: int) -> Odd:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("d",))
    for name, parameter in list(module.named_parameters()):
        placement = Shard(0) if parameter.ndim else Replicate()
        cut = distribute_tensor(parameter.detach(), mesh, [placement])
        setattr(module, name, nn.Parameter(cut))
    module.tied = module.w
    return module


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1, betas=(0.8, 0.9))


def save(keeper: Checkpointer, number: int, module: nn.Module, opt: torch.optim.Optimizer) -> None:
    state, aliases = module_state(module)
    moments, facts = optimizer_state(module_parameters(module), opt)
    keeper.save(number, state | moments, {"optimizer": facts}, aliases)


def load(keeper: Checkpointer, module: nn.Module, opt: torch.optim.Optimizer) -> None:
    state, aliases = module_state(module)
    moments = prepare_optimizer(module_parameters(module), opt, keeper.read_index())
    loaded = keeper.load(state | moments, aliases=aliases)
    restore_settings(module_parameters(module), opt, loaded.meta["optimizer"])


def full(tensor: torch.Tensor) -> list[float]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return [float(x) for x in whole.flatten().tolist()]


def everything(module: nn.Module, opt: torch.optim.Optimizer) -> dict[str, list[float]]:
    state = module_state(module)[0] | optimizer_state(module_parameters(module), opt)[0]
    return {name: full(value) for name, value in sorted(state.items())}  # type: ignore[arg-type]


@pytest.mark.fake
@pytest.mark.parametrize("make", [adam, lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9)])
def test_resume_on_one_rank_is_bit_exact(tmp_path: Path, make: Any) -> None:
    module = Odd()
    optimizer = make(module)
    with Checkpointer(tmp_path) as keeper:
        for number in range(3):
            step(module, optimizer, number)
        optimizer.param_groups[0]["lr"] = 0.05
        save(keeper, 3, module, optimizer)
        other = Odd()
        again = make(other)
        load(keeper, other, again)
        assert keeper.read_index().aliases == {"model/tied": "model/w"}
        assert "model/table" not in keeper.read_index().tensors
    assert again.param_groups[0]["lr"] == 0.05 and other.tied is other.w
    for number in (3, 4):
        step(module, optimizer, number)
        step(other, again, number)
    assert everything(module, optimizer) == everything(other, again)


@pytest.mark.fake
def test_wrapper_names_do_not_reach_the_file() -> None:
    plain, wrapped = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    wrapped[0] = torch.compile(wrapped[0], backend="eager")  # type: ignore[assignment]
    wrapped = torch.compile(wrapped, backend="eager")  # type: ignore[assignment]
    assert any("_orig_mod" in name for name in wrapped.state_dict())
    assert list(module_state(wrapped)[0]) == list(module_state(plain)[0])
    moments, facts = optimizer_state(module_parameters(wrapped), adam(wrapped))
    assert facts["groups"][0]["params"] == ["0.weight", "0.bias"] and not moments


@pytest.mark.fake
def test_an_optimizer_of_another_module_is_refused() -> None:
    with pytest.raises(CheckpointError, match="parameters of the module"):
        optimizer_state(module_parameters(nn.Linear(2, 2)), adam(nn.Linear(2, 2)))


@pytest.mark.fake
def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[Any, ...]:
        gauss = random.gauss(0, 1), np.random.standard_normal()
        return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist(), gauss

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    draw()  # leaves the second halves of two normal pairs waiting
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, random_state(0))
        expected = [draw(), draw()]
        tensors = empty_random_state(keeper.read_index(), 5)  # a sixth rank takes rank 0's
        keeper.load(tensors)
    restore_random_state(tensors)
    assert [draw(), draw()] == expected


@pytest.mark.procs
def test_adamw_saved_on_four_ranks_goes_on_on_one_two_three_and_six(tmp_path: Path) -> None:
    def train(rank: int) -> dict[str, list[float]]:
        module = shard(Odd(), 4)
        optimizer = adam(module)
        with Checkpointer(tmp_path, rank=rank, world=4) as keeper:
            for number in range(3):
                step(module, optimizer, number)
            save(keeper, 3, module, optimizer)
            step(module, optimizer, 3)
        return everything(module, optimizer)

    module = Odd()
    optimizer = adam(module)
    for number in range(3):
        step(module, optimizer, number)
    at_three = everything(module, optimizer)
    step(module, optimizer, 3)
    at_four = everything(module, optimizer)
    for values in run_ranks(4, train):
        assert values == at_four

    def resume(rank: int, world: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        module = shard(Odd(), world)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(float("nan"))
        optimizer = adam(module)
        with Checkpointer(tmp_path, rank=rank, world=world) as keeper:
            load(keeper, module, optimizer)
        loaded = everything(module, optimizer)
        step(module, optimizer, 3)
        return loaded, everything(module, optimizer)

    for world in (1, 2, 3, 6):
        for loaded, after in run_ranks(world, resume, world):
            assert loaded == at_three, world
            assert after == at_four, world


@pytest.mark.procs
def test_a_rank_killed_midway_through_a_save(tmp_path: Path) -> None:
    real = CheckpointWriter.write_data

    def train(rank: int, doomed: bool) -> int | None:
        def write_data(writer: CheckpointWriter, *args: Any) -> Any:
            result = real(writer, *args)
            if doomed and rank == 1 and "000004" in str(writer.folder):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        CheckpointWriter.write_data = write_data  # type: ignore[method-assign]
        module = shard(Odd(), 3)
        optimizer = adam(module)
        with Checkpointer(tmp_path, rank=rank, world=3) as keeper:
            if keeper.newest() is not None:
                load(keeper, module, optimizer)
            for number in (3, 4):
                step(module, optimizer, number)
                save(keeper, number, module, optimizer)
            return keeper.newest()

    began = time.monotonic()
    with pytest.raises(RunError):
        run_ranks(3, train, True)
    assert time.monotonic() - began < 15
    assert (tmp_path / "step_000004.tmp").is_dir()
    assert (tmp_path / "latest").read_text() == "step_000003\n"
    assert run_ranks(3, train, False) == [4, 4, 4]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000003", "step_000004"]
