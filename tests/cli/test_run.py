"""The check against one device fails where losses differ, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperparallel.cli.request import Request
from hyperparallel.cli.run import check_losses, with_run_folder
from hyperparallel.errors import RunError, UserError
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from hyperparallel.recipes import Recipe
from hyperparallel.train import job as train_job
from hyperparallel.train.config import make_config
from hyperparallel.train.job import TrainJob
from hyperparallel.train.loop import TrainResult
from tests.cli.tiny import build

pytestmark = pytest.mark.fake
PLAN = Plan(Mesh((2,), ("dp",)))
ALONE = [2.0, 1.5, 1.25]


def _result(losses: list[float], first: int = 0) -> TrainResult:
    return TrainResult(first, first + len(losses), tuple(losses), False)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    monkeypatch.setattr(train_job, "single_device_losses", lambda job, steps: ALONE[:steps])
    return TrainJob(make_config({"steps": 3}), PLAN, build, Path("tokens.bin"))


def test_equal_losses_pass(job: TrainJob, capsys: pytest.CaptureFixture[str]) -> None:
    check_losses(job, _result([2.0, 1.5 * (1 + 5e-6), 1.25, 1.0]))
    assert "check passed: 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("losses", [[2.0, 1.5, 1.25 * (1 + 3e-5)], [2.0, float("nan"), 1.25]])
def test_other_losses_fail(job: TrainJob, losses: list[float]) -> None:
    with pytest.raises(RunError, match="not the same run"):
        check_losses(job, _result(losses))


def test_a_resumed_run_is_not_compared(job: TrainJob, capsys: pytest.CaptureFixture[str]) -> None:
    check_losses(job, _result([9.0], first=1))
    assert "left out" in capsys.readouterr().out


def test_ranks_of_other_launchers_must_agree_on_a_folder() -> None:
    recipe = Recipe("tiny", build)
    saving = Request(recipe, make_config({"checkpoint_every": 1}), PLAN)
    with pytest.raises(UserError, match="run_folder"):
        with_run_folder(saving, shared=True)
    alone = with_run_folder(saving, shared=False).config.run_folder
    assert alone is not None and alone.parts[0] == "runs" and alone.name.startswith("tiny-")
