"""Uneven stages and mixed recomputation: found where they gain, right by brute force, within memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.step.balance import balanced, closed_seconds
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.simulated_step import simulated_step
from hyperparallel.planner.step.stages import ACTIONS, Split, even_split, layer_kinds
from hyperparallel.planner.strategy import Strategy
from tests.planner.sample import job, tight

pytestmark = pytest.mark.pure


def without_host(one: PlanningJob) -> PlanningJob:
    return replace(one, cluster=replace(one.cluster, memory=one.cluster.memory[:1]))


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    # The vocabulary's product is as much work as several layers.
    one = tight(layers=24, capacity=80e9)
    one = replace(one, model=replace(one.model, vocab=256000))
    strategy = Strategy(pp=4, dp=2)
    prices = LayerPrices(one, strategy, Constants())
    split = balanced(prices)
    assert split is not None
    counts = split.counts()
    assert sum(counts) == 24 and counts[-1] < 6 and max(counts) > 6
    even = simulated_step(one, strategy, prices=prices)
    assert simulated_step(one, strategy, split, prices=prices).seconds < even.seconds


def test_equals_brute_force_over_contiguous_stages() -> None:
    one = tight(layers=12, capacity=80e9)
    one = replace(one, model=replace(one.model, vocab=160000))
    strategy = Strategy(pp=4, dp=2)
    prices = LayerPrices(one, strategy, Constants())
    kinds = layer_kinds(one)
    options = []
    for cut in combinations(range(1, 12), 3):
        bounds = (0, *cut, 12)
        stages = [tuple((k, "none") for k in kinds[a:b]) for a, b in pairwise(bounds)]
        options.append(closed_seconds(prices, Split(tuple(stages))))
    found = balanced(prices)
    assert found is not None
    assert closed_seconds(prices, found) == pytest.approx(min(options), rel=2e-3)


def test_only_as_many_layers_are_recomputed_as_memory_asks() -> None:
    one = without_host(tight(layers=12, capacity=24e9))
    strategy = Strategy(dp=8, microbatch=4, recompute="full")
    prices = LayerPrices(one, strategy, Constants())
    held, working = prices.static_bytes()
    # Room for seven layers' activations besides what recomputation keeps of the other five.
    room = held + working + 7 * prices.saved_bytes("none") + 5 * prices.saved_bytes("full") + 1e6
    own = replace(one.cluster.memory[0], capacity_bytes=room)
    one = replace(one, cluster=replace(one.cluster, memory=(own,)))
    prices = LayerPrices(one, strategy, Constants())
    found = balanced(prices)
    assert found is not None
    actions = [action for _, action in found.stages[0]]
    seconds = [prices.layer(0, action) for action in ACTIONS[:4]]
    saved = [prices.saved_bytes(action) for action in ACTIONS[:4]]
    best = min(
        sum(t * n for t, n in zip(seconds, counts, strict=True))
        for counts in product(range(13), repeat=4)
        if sum(counts) == 12
        and sum(b * n for b, n in zip(saved, counts, strict=True)) <= room - held - working
    )
    assert sum(prices.layer(0, action) for action in actions) == pytest.approx(best, rel=2e-3)
    assert len(set(actions)) > 1
    step = simulated_step(one, strategy, found, prices=prices)
    assert step.timeline.peak_bytes() <= room * 1.001
    assert step.seconds < simulated_step(one, strategy, prices=prices).seconds


def test_leading_dense_layers_and_experts_stay_in_order() -> None:
    one = job("deepseek-v3", devices=256, batch=256, seq=4096)
    strategy = Strategy(tp=2, pp=8, dp=16, ep=32, sp=True, recompute="full", offload=1.0)
    found = balanced(LayerPrices(one, strategy, Constants()))
    if found is not None:
        assert [kind for stage in found.stages for kind, _ in stage] == layer_kinds(one)


def test_even_parts_stay_where_nothing_is_gained() -> None:
    one = tight(layers=16, capacity=80e9)
    one = replace(one, model=replace(one.model, vocab=0))
    strategy = Strategy(pp=4, dp=2)
    assert balanced(LayerPrices(one, strategy, Constants())) is None
    assert even_split(one, strategy).counts() == (4, 4, 4, 4)


@pytest.mark.parametrize("strategy", [
    Strategy(pp=4, dp=2, virtual=4, recompute="full"), Strategy(pp=8, virtual=2, recompute="full"),
    Strategy(pp=4, dp=2, recompute="full"), Strategy(pp=4, dp=2, schedule="zb-h1", recompute="alternate"),
], ids=Strategy.words)  # fmt: skip
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_what_is_found_fits_on_the_clock_too(strategy: Strategy, share: float) -> None:
    """Chunks of one layer each, boundaries and logits that count: the timeline's peak must stay in memory."""
    one = without_host(tight(layers=32, capacity=80e9))
    one = replace(one, model=replace(one.model, vocab=200000))
    low, high = (
        simulated_step(one, replace(strategy, recompute=r)).timeline.peak_bytes() for r in ("full", "none")
    )
    own = replace(one.cluster.memory[0], capacity_bytes=low + share * (high - low))
    one = replace(one, cluster=replace(one.cluster, memory=(own,)))
    prices = LayerPrices(one, strategy, Constants())
    even = simulated_step(one, strategy, prices=prices).timeline.peak_bytes()
    found = balanced(prices)
    if found is not None:
        peak = simulated_step(one, strategy, found, prices=prices).timeline.peak_bytes()
        assert peak <= max(own.capacity_bytes, even) + 1.0
