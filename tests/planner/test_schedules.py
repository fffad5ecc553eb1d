"""Every schedule of the table works wherever one is named, priced, searched, simulated or told."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from hyperparallel.cli.planning import read_fixed
from hyperparallel.errors import PlanError, UserError
from hyperparallel.mpmd import SCHEDULES, check_schedule
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.explain.page import planning_page
from hyperparallel.planner.explain.rows import rows, to_json
from hyperparallel.planner.planning import plan_job
from hyperparallel.planner.search.fixed import check_fixed
from hyperparallel.planner.search.reasons import neighbours, reasons
from hyperparallel.planner.search.space import Limits, pipelines, skeletons
from hyperparallel.planner.search.table import StrategyTable, predict, prediction, schedule_code
from hyperparallel.planner.step.account import state_shares
from hyperparallel.planner.step.balance import balanced, closed_seconds
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.simulated_step import order_of, simulated_step
from hyperparallel.planner.step.stages import even_split
from hyperparallel.planner.strategy import Candidates, Strategy
from tests.planner.sample import job, tight

pytestmark = pytest.mark.pure
CASES = [(name, v) for name, record in SCHEDULES.items() for v in record.usual_chunks]
SEARCHED = [name for name, record in SCHEDULES.items() if record.searched]


def strategy_of(name: str, virtual: int, pp: int = 4) -> Strategy:
    return Strategy(pp=pp, dp=8 // pp, virtual=virtual, schedule=name)


@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_a_strategy_says_its_schedule(name: str, virtual: int) -> None:
    strategy = strategy_of(name, virtual)
    assert name == "1f1b" or name in strategy.words().split()
    assert Candidates.of([strategy])[0] == strategy
    with pytest.raises(UserError, match=f"with schedule {name}|whole number of at least 1"):
        strategy_of(name, 0 if SCHEDULES[name].chunks(3) else 3)


@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_stages_are_simulated_where_the_order_has_them(name: str, virtual: int) -> None:
    one, strategy = tight(layers=16, capacity=80e9), strategy_of(name, virtual)
    order = order_of(strategy, 8)
    check_schedule(order)
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    step = simulated_step(one, strategy)
    seen = set()
    for span in step.timeline.spans:
        found = re.match(r"[FBIW](\d+)\.\d+( to .*)?", span.name)
        if found:
            seen.add(int(found[1]))
            assert span.rank == home[int(found[1])]
    assert seen == set(home) == set(range(4 * virtual))
    kinds = {a.kind for actions in order for a in actions}
    assert {re.match(r"[FBIW](?=\d)", s.name)[0] for s in step.timeline.spans  # type: ignore[index]
            if re.match(r"[FBIW]\d", s.name)} == kinds  # fmt: skip


@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_messages_cross_ranks_only(name: str, virtual: int) -> None:
    """At the point of a V the next stage stands on the same rank, and nothing is sent."""
    strategy = strategy_of(name, virtual)
    step = simulated_step(tight(layers=16, capacity=80e9), strategy)
    sent = {(int(a), int(b)) for s in step.timeline.spans
            for a, b in re.findall(r"^[FBIW](\d+)\.\d+ to [FBIW](\d+)\.", s.name)}  # fmt: skip
    away = {(s, s + 1) for s, (a, b) in enumerate(pairwise(strategy.homes)) if a != b}
    assert sent == away | {(b, a) for a, b in away}


@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_layers_and_states_are_counted_on_the_rank_that_holds_them(name: str, virtual: int) -> None:
    one, strategy = tight(layers=16, capacity=80e9), strategy_of(name, virtual)
    prices = LayerPrices(one, strategy, Constants())
    even = even_split(one, strategy)
    stages = list(even.stages)
    stages[-1], stages[-2] = (*stages[-1], *stages[-2][:1]), stages[-2][1:]
    shares = state_shares(prices, type(even)(tuple(stages)))
    home = {a.stage: rank for rank, actions in enumerate(order_of(strategy, 8)) for a in actions}
    last = len(stages) - 1
    assert shares[home[last]] > 1 > shares[home[last - 1]]
    assert sum(shares) == pytest.approx(4)
    found = balanced(prices)
    assert found is None or closed_seconds(prices, found) < closed_seconds(prices, even)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_prices_a_schedule_as_if_it_had_been_built_for_it(name: str) -> None:
    """Also what the first rank holds: embedding and head, where the last stage is there too."""
    one = job("deepseek-v2-lite", batch=64)
    virtual = SCHEDULES[name].usual_chunks[0]
    other = Strategy(pp=2, dp=4, ep=4)
    strategy = Strategy(pp=2, dp=4, ep=4, virtual=virtual, schedule=name)
    table = StrategyTable(one, Candidates.of([other]), Constants())
    columns = {"virtual": virtual, "schedule": schedule_code(name)}
    mine = prediction(strategy, table.step(**columns), table.memory(**columns), 0)
    (alone,) = predict(one, [strategy], Constants())
    assert mine.seconds == pytest.approx(alone.seconds) and mine.memory == pytest.approx(alone.memory)


@pytest.mark.parametrize("name", SEARCHED)
def test_what_is_searched_may_be_fixed_found_and_told(name: str) -> None:
    one = tight(layers=16, capacity=80e9)
    assert read_fixed(f"schedule={name},pp=4") == (("schedule", name), ("pp", 4))
    limits = Limits(fixed=(("schedule", name), ("pp", 4)))
    check_fixed(one, limits)
    offered = {v for s in skeletons(one, limits) for v, _ in pipelines(one, s, limits)}
    assert offered and all(SCHEDULES[name].chunks(v) for v in offered)
    planning = plan_job(one, limits=limits, top=2)
    best = planning.best.prediction.strategy
    assert best.schedule == name and planning.best.simulated is not None
    assert planning.best.even_seconds == pytest.approx(planning.best.prediction.seconds, rel=0.04)
    words = planning.best.words
    assert name == "1f1b" or name in re.split("[ ,]+", words)
    assert any(words in row for row in rows(planning)) and f'"{name}"' in to_json(planning)
    assert words in planning_page(planning)


@pytest.mark.parametrize("name", SEARCHED)
def test_a_schedule_is_a_choice_that_is_weighed(name: str) -> None:
    usual = Strategy(pp=4, dp=2, virtual=2) if name == "1f1b" else Strategy(pp=4, dp=2)
    near = {s.schedule for choice, s in neighbours(usual) if choice == "schedule"}
    assert name in near


def test_a_slower_schedule_is_told_by_its_name() -> None:
    one = job("llama3.1-8b", batch=32)
    fixed = Limits(fixed=(("pp", 4), ("tp", 1), ("zero", 1), ("recompute", "full"), ("microbatch", 1)))
    (best,) = predict(one, [Strategy(pp=4, dp=2, schedule="zb-v", virtual=2, recompute="full")], Constants())
    said = [r for r in reasons(one, best, limits=fixed, most=20) if r.choice == "zb-v"]
    assert len(said) == 1 and said[0].instead in SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES.keys() - set(SEARCHED))
def test_what_is_not_searched_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(PlanError, match=f"schedule of {', '.join(SEARCHED)}"):
        check_fixed(job(), Limits(fixed=(("schedule", name),)))
