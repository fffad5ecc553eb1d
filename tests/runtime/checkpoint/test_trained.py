"""Saving and loading by one call each: what one mesh saved, another goes on with as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hyperparallel as hp
from hyperparallel.errors import CheckpointError, UserError
from tests.models import PlainDecoder, plain_decoder, token_batches
from tests.ranks import run_ranks

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
BATCHES = token_batches(4)
STEPS = 2


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def train(call: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    losses = []
    for ids in batches:
        loss = call(ids)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def uninterrupted() -> tuple[list[float], nn.Module]:
    model = plain_decoder(torch.float64)
    return train(model, adamw(model.parameters()), BATCHES), model


def on_dp_tp(rank: int, folder: Path) -> list[float]:
    """Two steps as dp2 x tp2 with `parallelize`, saved."""
    mesh = hp.Layout((2, 2), ("dp", "tp"))
    plan = hp.Plan(mesh, {"*.o.weight": mesh(None, "tp")}, fsdp="dp")
    model = hp.parallelize(plain_decoder(torch.float64), plan, BATCHES[0])
    optimizer = adamw(model.parameters())
    losses = train(model, optimizer, BATCHES[:STEPS])
    hp.save_checkpoint(folder / "run", STEPS, model, optimizer, meta={"batch": STEPS})
    hp.save_safetensors(folder / "weights", model)
    return losses


def fresh() -> nn.Module:
    """Other weights, so that what is not loaded shows."""
    torch.manual_seed(5)
    return PlainDecoder().to(torch.float64)


def on_tp(rank: int, folder: Path) -> tuple[list[float], Any]:
    """The rest as tp2 with `TrainStep`."""
    mesh = hp.Layout((2,), ("tp",))
    step = hp.TrainStep(fresh(), adamw, hp.Plan(mesh, {"*.o.weight": mesh(None, "tp")}), BATCHES[0])
    meta = hp.load_checkpoint(folder / "run", step).meta
    losses = [step.step(ids).loss for ids in BATCHES[STEPS:]]
    hp.save_checkpoint(folder / "run", 4, step)
    return losses, meta["batch"]


def test_a_run_goes_on_on_another_mesh_and_on_one_device(tmp_path: Path) -> None:
    wanted, dense = uninterrupted()
    assert run_ranks(4, on_dp_tp, tmp_path, timeout=200)[0] == pytest.approx(wanted[:STEPS], rel=1e-10)
    losses, batch = run_ranks(2, on_tp, tmp_path, timeout=200)[0]
    assert losses == pytest.approx(wanted[STEPS:], rel=1e-10) and batch == STEPS

    last = fresh()
    assert hp.load_checkpoint(tmp_path / "run", last).step == 4
    for (name, got), true in zip(last.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-8, atol=1e-8, msg=name)

    middle, other = fresh(), fresh()
    optimizer = adamw(middle.parameters())
    hp.load_checkpoint(tmp_path / "run", middle, optimizer, step=STEPS)
    hp.load_safetensors(tmp_path / "weights", other)
    assert all(torch.equal(a, b) for a, b in zip(middle.parameters(), other.parameters(), strict=True))
    assert set(load_file(tmp_path / "weights" / "model.safetensors")) == dict(other.named_parameters()).keys()
    assert train(middle, optimizer, BATCHES[STEPS:]) == pytest.approx(wanted[STEPS:], rel=1e-10)


def test_mistakes_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="model: got 'int'"):
        hp.save_checkpoint(tmp_path, 1, 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="meta: got 'optimizer'"):
        hp.save_checkpoint(tmp_path, 1, model, meta={"optimizer": 1})
    with pytest.raises(CheckpointError):
        hp.load_checkpoint(tmp_path / "nowhere", model)
    with pytest.raises(CheckpointError):
        hp.load_safetensors(tmp_path / "nowhere", model)
