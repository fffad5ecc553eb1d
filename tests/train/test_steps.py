"""A sharded run goes on exactly where it was, on its own layout, on another, and on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.module.step import TrainStep
from hyperparallel.train.batches import Batches
from hyperparallel.train.config import TrainConfig, make_config
from hyperparallel.train.loop import TrainResult, train
from hyperparallel.train.steps import ShardedStep, SingleDeviceStep
from hyperparallel.train.tokens import TokenFile
from tests.ranks import run_ranks


class Scorer(nn.Module):
    """An embedding whose rows and columns do not divide, and a two-layer head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 31, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.down(torch.tanh(self.up(self.embed(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 31), labels.view(-1))}


def batches() -> Batches:
    ids = np.random.RandomState(0).randint(0, 31, 240).astype(np.uint16)
    return Batches(TokenFile(Path("memory"), ids, 31, "hash"), batch_size=4, seq_len=6)


def config(folder: Path, steps: int) -> TrainConfig:
    every = {"checkpoint_every": 3, "run_folder": folder}
    return make_config({"steps": steps, "schedule": "constant", "lr": 0.02} | every)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Scorer()


OTHERS = {"betas": (0.1, 0.2), "weight_decay": 0.5, "eps": 0.1}
"""Settings of an optimizer that goes on with a run: those that were saved must take their place."""


def sharded(
    rank: int, plan: Plan, folder: Path, steps: int, settings: dict[str, Any] | None = None
) -> TrainResult:
    def adamw(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, **(settings or {}))

    step = TrainStep(model(), adamw, plan, batches().batch(0), clip=1.0)
    world = plan.mesh.size
    return train(config(folder, steps), ShardedStep(step), batches(), rank=rank, world=world)


@pytest.mark.procs
def test_sharded_runs_resume_anywhere(tmp_path: Path) -> None:
    mesh, wide = Mesh((2,), ("tp",)), Mesh((3,), ("dp",))
    split = Plan(mesh, {"up.weight": mesh("tp", None), "embed.weight": mesh(None, "tp")})
    dense = Plan(wide, fsdp="dp")
    whole = run_ranks(2, sharded, split, tmp_path / "whole", 6)[0]
    assert run_ranks(2, sharded, split, tmp_path / "run", 3)[0].losses == whole.losses[:3]
    same = run_ranks(2, sharded, split, tmp_path / "run", 6, OTHERS)[0]
    assert same.first_step == 3 and same.losses == whole.losses[3:]  # bit for bit

    on_three = run_ranks(3, sharded, dense, tmp_path / "run", 9, OTHERS)[0]
    alone = model()
    step = SingleDeviceStep(alone, torch.optim.AdamW(alone.parameters()), clip_norm=1.0)
    reference = train(config(tmp_path / "alone", 12), step, batches()).losses
    assert on_three.first_step == 6
    other = model()
    step = SingleDeviceStep(other, torch.optim.AdamW(other.parameters(), **OTHERS), clip_norm=1.0)
    on_one = train(config(tmp_path / "run", 12), step, batches())
    assert on_one.first_step == 9
    # float32 sums in another order: a few ulp a step, over twelve steps
    losses = whole.losses + on_three.losses + on_one.losses
    assert losses == pytest.approx(reference, rel=1e-5)
