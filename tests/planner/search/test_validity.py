"""What a plan is warned of: where its prediction was never held against a published run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hyperparallel.mpmd import SCHEDULES
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.search.table import predict
from hyperparallel.planner.search.validity import VALIDATED_SCHEDULES, warnings
from hyperparallel.planner.strategy import Strategy
from tests.planner.sample import job

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_without_published_runs_is_named(name: str) -> None:
    one = job("llama3.1-8b", devices=64, batch=256, seq=4096)
    chunks = SCHEDULES[name].usual_chunks[0]
    strategy = Strategy(tp=2, pp=4, dp=8, schedule=name, virtual=chunks)
    alone = Strategy(tp=2, dp=32, schedule=name, virtual=chunks)  # without stages there is no order to trust
    said, unsaid = (
        [note for note in warnings(one, prediction) if note.startswith(f"{name}: ")]
        for prediction in predict(one, [strategy, alone], Constants())
    )
    assert len(said) == (name not in VALIDATED_SCHEDULES) and not unsaid


def test_published_runs_are_of_the_validated_schedules() -> None:
    """No table names a schedule and no row is given one: all are of the usual one."""
    usual = Strategy().schedule
    assert (usual,) == VALIDATED_SCHEDULES
    for source in (Path(__file__).parents[3] / "benchmarks/leaderboard").glob("*.py"):
        assert not re.search(r"\bschedule\b *=", source.read_text(encoding="utf-8")), source.name
