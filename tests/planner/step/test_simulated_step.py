"""The simulated step: agrees with the closed form where that is exact, and obeys pipelines' closed truths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest

from hyperparallel.cluster.presets import preset
from hyperparallel.mpmd import SCHEDULES
from hyperparallel.mpmd.bubble import bubble_share
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.search import search
from hyperparallel.planner.search.table import predict
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.simulated_step import ALONE, MOST_ACTIONS, simulated_step
from hyperparallel.planner.step.stages import Split, even_split
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.presets import gpt
from tests.planner.sample import job, tight

pytestmark = pytest.mark.pure

STRATEGIES = [
    Strategy(dp=8),
    Strategy(tp=2, dp=4, sp=True),
    Strategy(tp=4, dp=2, sp=True, recompute="full"),
    Strategy(dp=8, zero=3, recompute="alternate"),
    Strategy(cp=2, dp=4, offload=1.0),
    Strategy(tp=2, pp=2, dp=2, sp=True, microbatch=2),
    Strategy(pp=4, dp=2, schedule="zb-h1"),
    Strategy(pp=2, dp=4, virtual=2),
    *(
        Strategy(pp=4, dp=2, schedule=name, virtual=one.usual_chunks[0])
        for name, one in SCHEDULES.items()
        if name not in ("1f1b", "zb-h1")
    ),
]

DEEP = [
    Strategy(pp=8, virtual=4),
    Strategy(pp=4, dp=2, virtual=4, recompute="light"),
    Strategy(tp=2, pp=4, sp=True, microbatch=2),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=Strategy.words)
def test_agrees_with_the_closed_form(strategy: Strategy) -> None:
    one = job("llama3.1-8b", batch=64, seq=4096)
    (closed,) = predict(one, [strategy], Constants())
    step = simulated_step(one, strategy)
    # Gradients are hidden by one backward, not by any computation, and boundaries travel beside it.
    assert step.seconds == pytest.approx(closed.seconds, rel=0.04)
    assert step.timeline.peak_bytes() == pytest.approx(closed.peak_bytes, rel=0.04)


@pytest.mark.parametrize(
    ("pp", "virtual", "schedule"),
    [(2, 1, "1f1b"), (4, 1, "1f1b"), (4, 2, "1f1b"), (4, 1, "gpipe"), (4, 2, "zb-v")],
)
def test_bubbles_are_those_of_the_schedule(pp: int, virtual: int, schedule: str) -> None:
    # No head, no update, free messages: only the bubble is left.
    one = tight(layers=8, capacity=80e9)
    fabric = tuple(replace(f, bytes_s=1.9e12, latency_s=0.0) for f in one.cluster.fabric)
    one = replace(one, model=replace(one.model, vocab=0), cluster=replace(one.cluster, fabric=fabric))
    strategy = Strategy(pp=pp, dp=8 // pp, virtual=virtual, schedule=schedule)
    step = simulated_step(one, strategy)
    kinds = ("forward", "backward", "input gradients", "weight gradients")
    spans = [s for s in step.timeline.spans if s.kind in kinds]
    length = max(s.end for s in spans) - min(s.begin for s in spans)
    busy = sum(s.end - s.begin for s in spans) / pp
    count = one.global_batch // strategy.dp
    assert 1 - busy / length == pytest.approx(bubble_share(schedule, pp, count, virtual), abs=0.012)


@pytest.mark.parametrize("recompute", ["none", "selective", "alternate", "full"])
@pytest.mark.parametrize(
    ("pp", "tp", "microbatches", "seq"), [(2, 1, 4, 2048), (4, 2, 8, 8192), (8, 1, 8, 4096)]
)
def test_zb_h1_loses_what_its_closed_form_says(
    recompute: Literal["none", "selective", "alternate", "full"],
    pp: int,
    tp: int,
    microbatches: int,
    seq: int,
) -> None:
    """With the times of actual layers, where F, I and W are no thirds."""
    strategy = Strategy(pp=pp, tp=tp, sp=tp > 1, schedule="zb-h1", recompute=recompute)
    model = replace(gpt(4096, 16, 16, seq=seq), vocab=0)
    one = PlanningJob(model, preset("h100", strategy.devices), seq, microbatches)
    (closed,) = predict(one, [strategy], Constants())
    assert closed.seconds == pytest.approx(simulated_step(one, strategy).seconds, rel=0.01)


def test_skipped_microbatches_are_added_at_the_pace_of_the_fullest_rank() -> None:
    one = job("llama3.1-8b", batch=4096, seq=4096)
    strategy = Strategy(tp=2, pp=4, sp=True)
    few = simulated_step(replace(one, global_batch=1024), strategy)
    many = simulated_step(one, strategy)
    assert few.skipped and len(many.timeline.spans) < 20 * MOST_ACTIONS
    (a, b) = (predict(replace(one, global_batch=n), [strategy], Constants())[0].seconds for n in (1024, 4096))
    assert many.seconds - few.seconds == pytest.approx(b - a, rel=0.02)


def test_a_step_at_scale_takes_less_than_a_second() -> None:
    import time

    one = PlanningJob(*_large())
    best = search(one, keep=1).best[0]
    begin = time.process_time()
    simulated_step(one, best.strategy)
    assert time.process_time() - begin < 2.0  # twice what is asked, for machines that do other things


def _large() -> tuple:  # type: ignore[type-arg]
    from hyperparallel.workload.presets import load_model

    return load_model("llama3.1-405b"), preset("h100", 98304), 8192, 12288


@pytest.mark.parametrize("strategy", [*STRATEGIES, *DEEP], ids=Strategy.words)
def test_parts_add_up_and_the_peak_is_that_of_the_timeline(strategy: Strategy) -> None:
    one = job("llama3.1-8b", batch=256, seq=4096)
    even = even_split(one, strategy)
    kinds = [kind for stage in even.stages for kind, _ in stage]
    moved = [(kind, "offload" if i == 0 else "light" if i % 5 else "full") for i, kind in enumerate(kinds)]
    counts = [len(stage) for stage in even.stages]
    if len(counts) > 1:
        counts[0], counts[-1] = counts[0] - 1, counts[-1] + 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    uneven = Split(tuple(tuple(moved[end - n : end]) for n, end in zip(counts, ends, strict=True)))
    for split in (None, uneven):
        step = simulated_step(one, strategy, split)
        assert step.refined == (split is not None)
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert sum(step.held.parts.values()) == pytest.approx(step.timeline.peak_bytes())
        assert min(step.parts.values()) > -1e-6
    (closed,) = predict(one, [strategy], Constants())
    even_step = simulated_step(one, strategy)
    assert even_step.held.peak_bytes == pytest.approx(closed.peak_bytes)
    assert even_step.held.host_bytes == pytest.approx(closed.host_bytes)


def test_memory_is_that_of_the_whole_step_where_few_microbatches_are_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = job("gpt3-175b", devices=64, batch=64, seq=2048)
    strategy = Strategy(tp=8, pp=8, sp=True, virtual=12, recompute="light")
    few = simulated_step(one, strategy)
    (closed,) = predict(one, [strategy], Constants())
    monkeypatch.setattr("hyperparallel.planner.step.simulated_step.MOST_ACTIONS", 10**6)
    every = simulated_step(one, strategy)
    assert few.skipped and not every.skipped
    assert few.seconds == pytest.approx(every.seconds, rel=1e-3)
    assert few.timeline.peak_bytes() < few.held.peak_bytes - 1e8
    for peak in (few.held.peak_bytes, every.held.peak_bytes, closed.peak_bytes):
        assert peak == pytest.approx(every.timeline.peak_bytes())


def test_host_memory_holds_offloaded_activations_of_all_microbatches_in_flight() -> None:
    one = job("llama3.1-8b", batch=64, seq=4096)
    strategy = Strategy(pp=4, dp=2)
    prices = LayerPrices(one, strategy, Constants())
    even = even_split(one, strategy)
    moved = Split(tuple(tuple((kind, "offload") for kind, _ in stage) for stage in even.stages))
    step = simulated_step(one, strategy, moved, prices=prices)
    assert step.held.host_bytes == pytest.approx(4 * 8 * prices.saved_bytes("none"))  # of stage 0


def test_without_a_pipeline_activations_come_and_go_by_layer() -> None:
    one = job("llama3.1-8b", batch=8 * 40, seq=4096)
    strategy = Strategy(dp=8)
    step = simulated_step(one, strategy)
    assert step.skipped == 40 - ALONE
    samples = step.timeline.memory[0]
    levels = [sample.num_bytes for sample in samples]
    layer = LayerPrices(one, strategy, Constants()).saved_bytes("none")
    top = levels.index(max(levels))
    rises = [b - a for a, b in pairwise(levels[:top])]
    assert len(rises) >= 16 and all(0 < rise <= 2.001 * layer for rise in rises)
    low = next(i for i in range(top, len(levels)) if levels[i] < levels[0])
    falls = [a - b for a, b in pairwise(levels[top:low])]
    assert len(falls) >= 16 and all(0 < fall <= 2.001 * layer for fall in falls)


def test_the_last_layers_run_backward_first() -> None:
    one = job("llama3.1-8b", batch=32, seq=4096)
    kinds = [kind for stage in even_split(one, Strategy(dp=8)).stages for kind, _ in stage]
    split = Split((tuple((kind, "full" if i < 16 else "none") for i, kind in enumerate(kinds)),))
    levels = [sample.num_bytes for sample in simulated_step(one, Strategy(dp=8), split).timeline.memory[0]]
    top = levels.index(max(levels))
    rises = [b - a for a, b in pairwise(levels[:top])]
    falls = [a - b for a, b in pairwise(levels[top : 2 * top])]
    assert rises[0] < rises[-1] / 5 and falls[0] > 5 * falls[-2]


@pytest.mark.parametrize("strategy", STRATEGIES[:5], ids=Strategy.words)
def test_few_microbatches_stand_for_all_without_a_pipeline(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job("llama3.1-8b", batch=256, seq=4096)
    few = simulated_step(one, strategy)
    monkeypatch.setattr("hyperparallel.planner.step.simulated_step.ALONE", 10**6)
    every = simulated_step(one, strategy)
    assert few.skipped > 0 and every.skipped == 0
    assert few.seconds == pytest.approx(every.seconds, rel=2e-3)
    assert few.timeline.peak_bytes() == pytest.approx(every.timeline.peak_bytes())


def test_even_split_places_every_layer_once() -> None:
    one = job("deepseek-v3", devices=64)
    strategy = Strategy(pp=4, dp=16, virtual=2, ep=16)
    split = even_split(one, strategy)
    assert len(split.stages) == 8
    assert sum(split.counts()) == one.model.num_layers + one.model.mtp
    dense = [kind for stage in split.stages for kind, _ in stage][:3]
    assert dense == [0, 0, 0]


def test_offloaded_activations_leave_the_device_and_cost_what_does_not_fit_beside() -> None:
    one = job("llama3.1-8b", seq=4096)
    strategy = Strategy(dp=8)
    prices = LayerPrices(one, strategy, Constants())
    even = even_split(one, strategy)
    moved = Split(tuple(tuple((kind, "offload") for kind, _ in stage) for stage in even.stages))
    kept, away = (simulated_step(one, strategy, s, prices=prices) for s in (even, moved))
    saved = prices.saved_bytes("none") * 32
    assert kept.timeline.peak_bytes() - away.timeline.peak_bytes() == pytest.approx(saved, rel=0.01)
    assert away.seconds >= kept.seconds
    copied = sum(s.end - s.begin for s in away.timeline.spans if s.stream == "copy.host")
    read, write = one.cluster.tier("host").contended()
    assert copied == pytest.approx(4 * saved * (1 / read + 1 / write), rel=0.01)
