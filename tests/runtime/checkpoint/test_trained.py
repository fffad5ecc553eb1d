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
    with pytest.raises(UserError, match=r"meta: got 'optimizer'"):
        hp.save_checkpoint(tmp_path, 1, model, meta={"optimizer": 1})
    for step in (-1, 1.5, "3"):
        with pytest.raises(UserError, match=r"step: got .*a whole number of 0 or more"):
            hp.save_checkpoint(tmp_path, step, model)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"meta: got .*Tensor is not JSON"):
        hp.save_checkpoint(tmp_path, 1, model, meta={"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"model/weight: got a tensor on the meta device"):
        hp.save_checkpoint(tmp_path, 1, nn.Linear(2, 2, device="meta"))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"folder: got .*a folder that can be made"):
        hp.save_checkpoint(tmp_path / "file", 1, model)
    with pytest.raises(CheckpointError, match=r"folder: got .*a folder that can be made"):
        hp.save_safetensors(tmp_path / "file" / "below", model)
    with pytest.raises(CheckpointError):
        hp.load_checkpoint(tmp_path / "nowhere", model)
    with pytest.raises(CheckpointError):
        hp.load_safetensors(tmp_path / "nowhere", model)


class Layered(nn.Module):
    """A weight that two parts use, statistics that change, a layer without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        y = self.fixed(self.norm(self.embed(ids)))
        return {"loss": self.head(torch.tanh(self.inner(y))).pow(2).mean()}


def layered(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Layered().double()


IDS = [torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]


def parts_of(front: hp.Plan, back: hp.Plan) -> dict[str, hp.Part]:
    return {"front": hp.Part(["embed", "norm", "fixed"], front), "back": hp.Part(["inner", "head"], back)}


def on_some(names: tuple[str, ...], *ranks: int) -> hp.Plan:
    return hp.Plan(hp.Layout((len(ranks),), names, ranks=ranks))


def slowed(step: Any, rate: float) -> None:
    """Another learning rate than the optimizer is made with, as a schedule sets it."""
    for group in step.optimizer.param_groups if step.optimizer is not None else ():
        group["lr"] = rate


def saved_in_parts(rank: int, folder: Path) -> list[float] | None:
    """Two steps on ranks 1 to 3 of a job of 4; rank 0, which would write a job's index, is in no part."""
    if rank == 0:
        return None
    parts = parts_of(on_some(("dp",), 1, 2), on_some(("dp",), 3))
    step = hp.PartsStep(layered(0), adamw, parts, IDS[0])
    slowed(step, 3e-3)
    losses = [step.step(ids).loss for ids in IDS[:STEPS]]
    hp.save_checkpoint(folder / "run", STEPS, step, meta={"batch": STEPS})
    hp.save_safetensors(folder / "weights", step)
    return losses


def resumed_in_parts(rank: int, folder: Path) -> list[float]:
    """The rest in other parts on other ranks, one of them in both."""
    parts = parts_of(on_some(("dp",), 0), on_some(("tp",), 0, 1))
    step = hp.PartsStep(layered(5), adamw, parts, IDS[0])
    loaded = hp.load_checkpoint(folder / "run", step)
    assert loaded.step == STEPS and not loaded.missing and not loaded.unexpected
    return [step.step(ids).loss for ids in IDS[STEPS:]]


def loaded_whole(rank: int, folder: Path) -> list[float]:
    """The rest by a `TrainStep` on one mesh of the job's last two ranks."""
    if rank == 0:
        return []
    step = hp.TrainStep(layered(5), adamw, on_some(("dp",), 1, 2), IDS[0])
    hp.load_checkpoint(folder / "run", step, step=STEPS)
    losses = [step.step(ids).loss for ids in IDS[STEPS:]]
    hp.save_checkpoint(folder / "whole", 5, step)
    return losses


def in_parts_from_whole(rank: int, folder: Path) -> tuple[float, bool]:
    parts = parts_of(on_some(("dp",), 1), on_some(("tp",), 0))
    step = hp.PartsStep(layered(5), adamw, parts, IDS[0])
    hp.load_checkpoint(folder / "whole", step)
    other = hp.PartsStep(layered(5), adamw, parts, IDS[0])
    hp.load_safetensors(folder / "weights", other)
    return step.evaluate(IDS[0]), other.model.get_buffer("norm.running_mean").is_meta == (rank == 0)


def test_a_model_in_parts_goes_on_in_other_parts_on_one_mesh_and_on_one_device(tmp_path: Path) -> None:
    dense = layered(0)
    optimizer = torch.optim.AdamW(dense.parameters(), lr=3e-3)
    wanted = train(dense, optimizer, IDS)

    losses = run_ranks(4, saved_in_parts, tmp_path, timeout=200)
    assert losses[0] is None
    assert all(one == pytest.approx(wanted[:STEPS], rel=1e-9) for one in losses[1:])
    assert all(
        one == pytest.approx(wanted[STEPS:], rel=1e-9)
        for one in run_ranks(2, resumed_in_parts, tmp_path, timeout=200)
    )
    _, *whole = run_ranks(3, loaded_whole, tmp_path, timeout=200)
    assert all(one == pytest.approx(wanted[STEPS:], rel=1e-9) for one in whole)

    middle = layered(5)
    again = adamw(middle.parameters())
    hp.load_checkpoint(tmp_path / "run", middle, again)
    assert train(middle, again, IDS[STEPS:]) == pytest.approx(wanted[STEPS:], rel=1e-9)

    dense.eval()
    for loss, is_placed in run_ranks(2, in_parts_from_whole, tmp_path, timeout=200):
        assert loss == pytest.approx(dense(IDS[0])["loss"].item(), rel=1e-9) and is_placed


def test_settings_that_changed_while_training_are_loaded(tmp_path: Path) -> None:
    """The rates and options of each group, counters that are no tensors, and what comes of them."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layered(seed)
        groups = [
            {"params": [model.get_parameter("embed.weight")]},
            {"params": [p for part in ("norm", "inner") for p in model.get_submodule(part).parameters()]},
        ]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    model, optimizer = made(0)
    train(model, optimizer, IDS[:1])
    for group, rate in zip(optimizer.param_groups, (0.03, 0.007), strict=True):
        group["lr"] = rate
    optimizer.param_groups[1].update(momentum=0.5, nesterov=True)
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["seen"] = 17
    hp.save_checkpoint(tmp_path, 1, model, optimizer)

    other, loaded = made(5)
    hp.load_checkpoint(tmp_path, other, loaded)
    kept = [{k: v for k, v in group.items() if k != "params"} for group in loaded.param_groups]
    assert kept == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert loaded.state[loaded.param_groups[0]["params"][0]]["seen"] == 17
    assert train(other, loaded, IDS[1:]) == train(model, optimizer, IDS[1:])


def test_a_state_that_the_optimizer_can_not_take_is_refused_or_left_out(tmp_path: Path) -> None:
    """Nothing that was asked for is skipped in silence: moments of another kind, or none at all."""
    old = nn.Linear(2, 2)
    optimizer = adamw(old.parameters())
    train(lambda x: {"loss": old(x).sum()}, optimizer, [torch.ones(3, 2)])
    hp.save_checkpoint(tmp_path / "adamw", 1, old, optimizer)
    hp.save_checkpoint(tmp_path / "bare", 1, old)
    for folder, words in (("adamw", "the state of AdamW"), ("bare", "no optimizer")):
        new = nn.Linear(2, 2)
        sgd = torch.optim.SGD(new.parameters(), lr=0.5, momentum=0.9)
        with pytest.raises(CheckpointError, match=rf"optimizer: got {words}; .*with SGD; write strict=False"):
            hp.load_checkpoint(tmp_path / folder, new, sgd)
        assert not torch.equal(new.weight, old.weight)
        hp.load_checkpoint(tmp_path / folder, new, sgd, strict=False)
        assert torch.equal(new.weight, old.weight) and not sgd.state and sgd.param_groups[0]["lr"] == 0.5
