"""The search: what it finds is the best there is, and more never hurts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from hyperparallel.cluster.axis_links import FILLS
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.presets import preset
from hyperparallel.errors import PlanError
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search import search as module
from hyperparallel.planner.search.axis_order import axis_orders, place_words
from hyperparallel.planner.search.reasons import reasons
from hyperparallel.planner.search.search import Objective, minimal, rank_key, search
from hyperparallel.planner.search.space import Limits, levels, norm_cuts, pipelines, skeletons, zeros
from hyperparallel.planner.search.table import Prediction, predict
from hyperparallel.planner.strategy import ORDERS, Strategy
from tests.planner.sample import job, tight

pytestmark = pytest.mark.pure


def every_strategy(one: PlanningJob, pruned: bool = False) -> list[Strategy]:
    """The whole space, one by one; pruned: only placements that differ."""
    found = []
    sizes = skeletons(one)
    for s, places in zip(sizes, axis_orders(one, sizes), strict=True):
        where = places if pruned else product(ORDERS, FILLS)
        inside = product(pipelines(one, s), zeros(one, s), norm_cuts(s), where, levels(one))
        for (virtual, schedule), zero, sp, (order, fill), (recompute, offload) in inside:
            found.append(
                Strategy(**s._asdict(), virtual=virtual, schedule=schedule, zero=zero, sp=sp, order=order,
                         fill=fill, recompute=recompute, offload=offload)  # type: ignore[arg-type]
            )  # fmt: skip
    return found


def all_that_fit(one: PlanningJob) -> list[Prediction]:
    """The whole space, each strategy priced on its own."""
    host = one.cluster.tier("host").capacity_per_device_bytes
    return [
        p
        for p in predict(one, every_strategy(one), Constants())
        if p.peak_bytes <= one.cluster.capacity_bytes and p.host_bytes <= host
    ]


JOBS = {
    "dense": lambda: job("qwen3-0.6b", devices=8, batch=16),
    "experts": lambda: job("deepseek-v2-lite", devices=8, batch=16),
    "little memory": lambda: tight(capacity=6e9),
    "two nodes": lambda: tight(devices=16, batch=16),
    "mesh": lambda: on_mesh("deepseek-v2-lite", (4, 2)),
    "torus": lambda: job("qwen3-0.6b", "tpu-v5p", devices=16, batch=16),
}


def on_mesh(model: str, size: tuple[int, ...], kind: str = "mesh") -> PlanningJob:
    """A rack with slow links of its own, so that placement decides."""
    one = job(model, devices=8, batch=16)
    rack = Fabric("rack", kind, size, 50e9, 1e-6)
    return replace(one, cluster=replace(one.cluster, name="rack", fabric=(rack,)))


@pytest.mark.parametrize("name", list(JOBS))
def test_equals_brute_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = JOBS[name]()
    monkeypatch.setattr(module, "PLACED", 10**6)
    monkeypatch.setattr(module, "REFINED", 10**6)
    fitting = all_that_fit(one)
    objectives: tuple[Objective, ...] = ("time", "memory")
    for objective in objectives:
        wanted = min(fitting, key=lambda p: rank_key(p, objective))
        best = search(one, objective).best[0]
        assert best.seconds == pytest.approx(wanted.seconds, rel=1e-6), objective
        assert best.peak_bytes == pytest.approx(wanted.peak_bytes, rel=1e-6), objective


def test_counts_the_whole_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLACED", 10**6)
    one = job("qwen3-0.6b", devices=4, batch=8)
    assert search(one).considered == len(every_strategy(one, pruned=True))


@pytest.mark.parametrize("name", list(JOBS))
def test_the_first_pass_keeps_the_best(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = JOBS[name]()
    monkeypatch.setattr(module, "PLACED", 10**6)
    monkeypatch.setattr(module, "REFINED", 10**6)
    wanted = search(one).best[0].seconds
    monkeypatch.setattr(module, "REFINED", max(4, len(skeletons(one)) // 6))
    monkeypatch.setattr(module, "PLACED", max(2, len(skeletons(one)) // 12))
    assert search(one).best[0].seconds <= wanted * 1.01


@pytest.mark.parametrize("fixed", [(), (("virtual", 2), ("pp", 2)), (("schedule", "zb-h1"), ("pp", 2))])
@pytest.mark.parametrize("name", ["experts", "little memory"])
def test_predictions_of_the_search_are_those_of_the_strategy_alone(name: str, fixed: tuple) -> None:  # type: ignore[type-arg]
    one = JOBS[name]()
    best = search(one, limits=Limits(fixed=fixed), keep=64).best
    assert best
    for p in best:
        (alone,) = predict(one, [p.strategy], Constants())
        assert alone.seconds == pytest.approx(p.seconds, rel=1e-9)
        assert alone.memory == pytest.approx(p.memory, rel=1e-9)
        assert sum(p.parts.values()) == pytest.approx(p.seconds)


def test_more_devices_are_never_slower() -> None:
    seconds = [search(job("llama3.1-8b", devices=n, batch=256)).best[0].seconds for n in (8, 16, 32, 64, 128)]
    assert seconds == sorted(seconds, reverse=True)


def test_more_memory_is_never_worse() -> None:
    seconds = [search(tight(capacity=c)).best[0].seconds for c in (4e9, 5e9, 6e9, 8e9, 12e9, 24e9, 80e9)]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(seconds))
    assert seconds[0] > seconds[-1]


def test_faster_links_are_never_worse() -> None:
    one = job("llama3.1-8b", devices=32, batch=64)
    slow = replace(one.cluster, fabric=tuple(replace(f, bytes_s=f.bytes_s / 4) for f in one.cluster.fabric))
    assert search(replace(one, cluster=slow)).best[0].seconds >= search(one).best[0].seconds


def test_minimal_has_nothing_below() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    for _ in range(50):
        # What fits with little recomputation and offload fits with more of them.
        need = np.maximum.accumulate(np.maximum.accumulate(rng.random((2, 3, 5)) < 0.3, axis=0), axis=1)
        wanted = minimal(need)
        for o, r, k in product(range(2), range(3), range(5)):
            below = any(need[a, b, k] for a in range(o + 1) for b in range(r + 1) if (a, b) != (o, r))
            assert wanted[o, r, k] == (need[o, r, k] and not below)


def test_devices_that_nothing_divides_are_refused_with_near_numbers() -> None:
    with pytest.raises(PlanError, match=r"write --global-batch 56 or") as caught:
        search(job("gpt2-xl", devices=56, batch=31, seq=1024), limits=Limits(fixed=(("pp", 1), ("tp", 1))))
    assert "56 devices for gpt2-xl and 31 samples" in str(caught.value)


def test_a_placement_that_gains_is_found_and_told() -> None:
    """Four ranks of tp leave a row of the rack half free: cp does better on the column, and it is said so."""
    limits = Limits(fixed=(("tp", 4), ("cp", 8), ("pp", 1), ("zero", 1), ("microbatch", 1)))
    one = replace(job("llama3.1-8b", devices=64, seq=65536, batch=8), cluster=preset("ub-mesh-1024", 64))
    best = search(one, limits=limits).best[0]
    packed = Limits(fixed=(*limits.fixed, ("fill", "packed"), ("order", ORDERS[0])))
    usual = search(one, limits=packed).best[0]
    assert best.strategy.fill == "apart" and best.seconds < usual.seconds
    assert place_words(one, best.strategy, "cp") == " (on the rack's second dimension)"
    assert place_words(one, usual.strategy, "cp") == " (on 2 x 4 of the rack)"
    said = [reason.words for reason in reasons(one, best, limits=limits)]
    assert any("cp8 (on the rack's second dimension): cp8 (on 2 x 4 of the rack) is" in text for text in said)
