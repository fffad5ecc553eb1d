"""Uneven stages and per-layer recomputation or offload, by an integer program.

The head makes the last stage longer, encoders the first, and leading dense layers differ from experts, so
equal parts are not equal times; and if "all kept" does not fit, "all recomputed" does too much. With
n[s, r, a] layers of run r (equal layers in a row) in stage s under action a (keep, recompute what
is light, half or all, offload what is saved), t[r, a] seconds of a layer and microbatch and b[a] saved bytes,

    minimise   m T + cold / p * sum n t         (the closed form of `cost/price.py`, `LayerPrices.cold_share`)
    subject to T >= sum of n t over the stages of each rank, its head or encoders included, and v times that
               of a stage
               states + sum n (state bytes + in flight of the rank * b) <= capacity, and the same for the host
               all layers placed, none of a run before the run in front of it is done

In flight are as many microbatches of all chunks of a rank; where chunks differ, more may be of the larger
ones, so what comes out is held against the order of actions (`account.peak_memory`) and the program solved
again with less room, `TRIES` times at most.

A model whose layers alternate in more than `MOST_RUNS` runs is placed as layers of mean cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hyperparallel.planner.cost.memory import first_chunk_held
from hyperparallel.planner.step.account import peak_memory, state_shares
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.simulated_step import filled_order
from hyperparallel.planner.step.stages import ACTIONS, Split, even_split, layer_kinds
from hyperparallel.planner.strategy import Strategy

MOST_RUNS = 6
LEAST_GAIN = 0.003
"""Share of the step below which an uneven split isn't worth its irregularity."""

SOLVER_SECONDS = 1.0
TRIES = 3


@dataclass(frozen=True)
class _Facts:
    """Numbers of the program: stages, microbatches, bytes, and seconds [run][action]; cold: what the pipeline
    loses once a step, as a share of all layers' seconds for a microbatch."""

    strategy: Strategy
    microbatches: int
    runs: list[tuple[int, int]]
    seconds: list[list[float]]
    saved: list[float]
    states: float
    fixed: float
    capacity: float
    host_room: float
    head: float
    cold: float
    front: float
    front_bytes: float
    edge: float
    logits: float

    @property
    def stages(self) -> int:
        return self.strategy.pp * self.strategy.virtual


def balanced(prices: LayerPrices) -> Split | None:
    """A better split than even parts with one recomputation for all; None where there is none."""
    facts = _facts(prices)
    room, host_room = facts.capacity, facts.host_room + prices.host_bytes()
    even, order = even_split(prices.job, prices.strategy), filled_order(prices.job, prices.strategy)
    for _ in range(TRIES):
        found = _solve(facts)
        if found is None:
            return None
        split = _split(prices, facts, found)
        if closed_seconds(prices, split) >= closed_seconds(prices, even) * (1.0 - LEAST_GAIN):
            return None
        kept = peak_memory(prices, split, order, state_shares(prices, split))
        over, away = kept.peak_bytes - room, kept.host_bytes - host_room
        if over <= 1.0 and away <= 1.0:
            return split
        facts = replace(
            facts, capacity=facts.capacity - max(over, 0.0), host_room=facts.host_room - max(away, 0.0)
        )
    return None


def closed_seconds(prices: LayerPrices, split: Split) -> float:
    """What the program minimises: seconds of all microbatches and of the cold pipeline."""
    strategy = prices.strategy
    facts = _facts(prices)
    ranks = [0.0] * strategy.pp
    for stage, layers in enumerate(split.stages):
        ranks[strategy.homes[stage]] += sum(prices.layer(kind, action) for kind, action in layers)
    total = sum(ranks)
    ranks[strategy.homes[-1]] += facts.head
    ranks[0] += facts.front
    chunks = [sum(prices.layer(kind, action) for kind, action in layers) for layers in split.stages]
    longest = max(*ranks, strategy.virtual * max(chunks))
    return facts.microbatches * longest + facts.cold * total


def _front_held(prices: LayerPrices) -> float:
    """Bytes that encoders keep of all microbatches in flight."""
    r = prices.table.rows.row
    chunks = first_chunk_held(r["pp"], r["microbatches"], r["virtual"], r["schedule"])
    return float(prices.front_saved_bytes() * chunks[0])


def _facts(prices: LayerPrices) -> _Facts:
    job, strategy = prices.job, prices.strategy
    kinds = layer_kinds(job)
    runs: list[tuple[int, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    actions = ACTIONS if job.cluster.has_tier("host") else ACTIONS[:-1]
    # Every run has a column for each stage and action: alternating layers would make thousands.
    if len(runs) > MOST_RUNS:
        mean = [sum(prices.layer(k, a) for k in kinds) / len(kinds) for a in actions]
        runs, seconds = [(-1, len(kinds))], [mean]
    else:
        seconds = [[prices.layer(kind, a) for a in actions] for kind, _ in runs]
    static, working = prices.static_bytes()
    edge = 2.0 * float(prices.row["boundary_bytes"]) if strategy.pp > 1 else 0.0
    states = prices.layer_state_bytes()
    # Never less room than the plan it starts from takes, which the search found to fit.
    count = math.ceil(len(kinds) / strategy.pp)
    room = math.inf
    if job.cluster.has_tier("host"):
        room = job.cluster.tier("host").capacity_per_device_bytes - prices.host_bytes()
    head, front = prices.head(), prices.front()
    return _Facts(
        strategy,
        job.global_batch // (strategy.dp * strategy.microbatch),
        runs,
        seconds,
        [prices.saved_bytes(a) for a in actions],
        states,
        static - states * len(kinds) / strategy.pp + working,
        max(
            job.cluster.capacity_bytes,
            static + working + prices.in_flight() * (count * prices.own_saved() + edge) + _front_held(prices),
        ),
        room,
        head.compute + head.tensor,
        prices.cold_share() / strategy.pp,
        front.compute + front.tensor + front.gather,
        _front_held(prices),
        edge,
        prices.working_bytes(last=True) - working,
    )


def _held(facts: _Facts, rank: int) -> float:
    """Microbatches of a whole rank's layers that it keeps at once."""
    s = facts.strategy
    return float(s.pipeline.held(s.pp, facts.microbatches, s.virtual, rank)) / s.virtual


def _solve(facts: _Facts) -> dict[tuple[int, int, int], int] | None:
    from hyperparallel.integer_program import IntegerProgram

    s, stages, homes = facts.strategy, facts.stages, facts.strategy.homes
    program = IntegerProgram()
    # T is a column of its own: the maximum over ranks becomes one row for each of them.
    longest = program.column(float(facts.microbatches), most=math.inf)
    columns: dict[tuple[int, int, int], int] = {}
    for stage in range(stages):
        for run, (_, count) in enumerate(facts.runs):
            for action, seconds in enumerate(facts.seconds[run]):
                columns[stage, run, action] = program.column(facts.cold * seconds, True, float(count))
    for run, (_, count) in enumerate(facts.runs):
        program.row([c for (_, r, _), c in columns.items() if r == run], (), count, count)
    for rank in range(s.pp):
        mine = {k: c for k, c in columns.items() if homes[k[0]] == rank}
        head = facts.head if rank == homes[-1] else 0.0
        head += facts.front if rank == 0 else 0.0
        # T >= every rank's seconds: the least T is the longest of them.
        weights = {c: -facts.seconds[run][action] for (_, run, action), c in mine.items()}
        program.weighted({longest: 1.0, **weights}, head, math.inf)
        flying = _held(facts, rank)
        bytes_of = {c: facts.states + flying * facts.saved[action] for (_, _, action), c in mine.items()}
        fixed = facts.fixed + flying * facts.edge + (facts.front_bytes if rank == 0 else 0.0)
        fixed += facts.logits if rank == homes[-1] else 0.0
        # Divided by the capacity, or bytes would drown the solver's absolute tolerances beside seconds.
        program.weighted(_scaled(bytes_of, facts.capacity), -math.inf, 1.0 - fixed / facts.capacity)
        if len(facts.saved) == len(ACTIONS) and math.isfinite(facts.host_room):
            away = {
                c: flying * facts.saved[0] for (_, _, action), c in mine.items() if action == len(ACTIONS) - 1
            }
            program.weighted(
                _scaled(away, facts.capacity), -math.inf, max(facts.host_room, 0.0) / facts.capacity
            )
    # Chunks of a rank are done in turn: a long one holds up the others as v times its length would.
    for stage in range(stages if s.virtual > 1 else 0):
        weights = {c: -s.virtual * facts.seconds[r][a] for (k, r, a), c in columns.items() if k == stage}
        program.weighted({longest: 1.0, **weights}, 0.0, math.inf)
    _in_order(program, facts, columns)
    _no_empty_stage(program, stages, columns)
    try:
        # A tenth of a per cent is less than the model knows, and large programs take minutes to prove the
        # rest.
        values, _, _ = program.solve(SOLVER_SECONDS, gap=1e-3)
    except RuntimeError:
        return None
    return {key: round(values[c]) for key, c in columns.items()}


def _scaled(weights: dict[int, float], by: float) -> dict[int, float]:
    return {column: weight / by for column, weight in weights.items()}


def _in_order(program: Any, facts: _Facts, columns: dict[tuple[int, int, int], int]) -> None:
    """A layer of a run stands in no stage before the last one of the run in front of it."""
    for run in range(1, len(facts.runs)):
        before, here = facts.runs[run - 1][1], facts.runs[run][1]
        for stage in range(facts.stages):
            done = program.column(0.0, True)  # 1: all of the run before is in this stage or earlier
            earlier = [c for (s, r, _), c in columns.items() if r == run - 1 and s <= stage]
            program.weighted({**dict.fromkeys(earlier, 1.0), done: -float(before)}, 0.0, math.inf)
            mine = [c for (s, r, _), c in columns.items() if r == run and s == stage]
            program.weighted({**dict.fromkeys(mine, 1.0), done: -float(here)}, -math.inf, 0.0)


def _no_empty_stage(program: Any, stages: int, columns: dict[tuple[int, int, int], int]) -> None:
    for stage in range(stages):
        program.at_least([c for (s, _, _), c in columns.items() if s == stage], (), 1.0)


def _split(prices: LayerPrices, facts: _Facts, found: dict[tuple[int, int, int], int]) -> Split:
    """Layers in order; in a stage those that are kept come last, for their backward is first."""
    kinds = layer_kinds(prices.job)
    stages = []
    place = 0
    for stage in range(facts.stages):
        layers: list[tuple[int, str]] = []
        for run in range(len(facts.runs)):
            # Backward runs from the last layer: kept ones free their memory first.
            for action in reversed(range(len(facts.saved))):
                for _ in range(found[stage, run, action]):
                    layers.append((kinds[place], ACTIONS[action]))
                    place += 1
        stages.append(tuple(layers))
    return Split(tuple(stages))
