"""What eager software and unpadded vocabularies cost, as laws between priced steps."""

from __future__ import annotations

import pytest

from hyperparallel.cluster.presets import preset
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.price import step_seconds
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.workload.presets import gpt

pytestmark = pytest.mark.pure


def seconds(
    vocab: int = 51200, tp: int = 1, graph: bool = False, hidden: int = 2048, host: float = 20.0
) -> float:
    one = Strategy(tp=tp, dp=8 // tp, microbatch=4, zero=0, flash=False, graph=graph, fused_loss=False)
    rows = rows_of(
        gpt(hidden, 12, 16, vocab=vocab, seq=1024), preset("a100", 8), 1024, 64.0, Candidates.of([one])
    )
    return float(step_seconds(rows, Constants(host=host)).seconds[0])


def test_an_odd_vocabulary_is_slower_than_one_padded_to_whole_vectors() -> None:
    assert seconds(vocab=50257) > 1.1 * seconds(vocab=50304)
    assert seconds(vocab=50257, tp=2) < 1.01 * seconds(vocab=50304, tp=2)  # 25,128 columns: whole vectors


@pytest.mark.parametrize("tp", [1, 4])
def test_the_host_shows_most_where_the_device_has_little_to_do(tp: int) -> None:
    small, large = (seconds(tp=tp, hidden=h) / seconds(tp=tp, hidden=h, host=1e-3) for h in (512, 8192))
    assert small > 1.2 > 1.1 > large >= 1.0


def test_ranks_in_lockstep_hide_less_of_the_host() -> None:
    alone, together = (
        seconds(tp=tp, hidden=8192, host=20.0) - seconds(tp=tp, hidden=8192, host=1e-3) for tp in (1, 4)
    )
    assert together / 4 > 2.0 * alone  # a step of tp 4 has four times the microbatches
