"""One strategy's step on the clock: a representative rank for each pipeline stage, all else alike.

An action (a microbatch in a stage) is cut in a few parts. Each part computes, its hidden messages travel
beside it, and what the cost model calls exposed follows it, so that without a pipeline the simulated step
has the parts of the closed form. Boundaries between stages are messages of their own that compete with the
others for the links (`traffic.shares`); gradients are reduced beside the last backward and behind it.

Where a step has more actions than `MOST_ACTIONS`, or no pipeline and more than `ALONE` microbatches, fewer
are simulated and the rest is added at the pace of the fullest rank (`Simulated.skipped`). Of several chunks a
stage these may be too few to hold as much at once as the whole step does, which `Simulated.held` counts.
Saved activations come and go part by part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from hyperparallel.mpmd import Action, Message, Schedule
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.price import gradient_seconds, step_seconds
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.step.account import PeakMemory, edge_bytes, peak_memory, state_shares, time_parts
from hyperparallel.planner.step.layer_costs import NO_PASS, LayerPrices, Pass
from hyperparallel.planner.step.stages import Split, even_split
from hyperparallel.planner.strategy import Strategy
from hyperparallel.simulate import TaskPart, TaskParts, Timeline, pipeline_tasks, simulate

MOST_ACTIONS, ALONE = 1500, 8
WANTED_PARTS = 400
"""Parts that a timeline should have at least, where layers are many enough."""


@dataclass(frozen=True)
class Simulated:
    """A simulated step. timeline: of the microbatches that were simulated; seconds: of the whole step;
    skipped: microbatches that were added at the steady pace; split: layers and recomputation by stage;
    refined: whether those differ from even ones; parts: of the seconds, adding up to them; held: memory of
    the whole step, the peak of the timeline or above."""

    strategy: Strategy
    split: Split
    timeline: Timeline
    seconds: float
    skipped: int
    refined: bool
    parts: Mapping[str, float]
    held: PeakMemory


def simulated_step(
    job: PlanningJob,
    strategy: Strategy,
    split: Split | None = None,
    constants: Constants | None = None,
    prices: LayerPrices | None = None,
) -> Simulated:
    """Simulate a step; split: uneven stages or recomputation, by default even ones."""
    used = prices or LayerPrices(job, strategy, constants or Constants())
    refined, split = split is not None, split or even_split(job, strategy)
    total = job.global_batch // (strategy.dp * strategy.microbatch)
    count = fewest_microbatches(strategy, total)
    order = order_of(strategy, count)
    builder = _Builder(used, split, order)
    tasks = pipeline_tasks(order, builder.parts, builder.message, builder.finish)
    timeline = simulate(tasks)
    # A full pipeline goes on at the pace of its fullest rank, so that what is skipped needs no simulation.
    seconds = timeline.step_seconds + (total - count) * builder.pace()
    facts = {"model": job.model.name, "cluster": job.cluster.name, "strategy": strategy.words()}
    timeline = replace(timeline, facts=facts)
    parts = builder.parts_of(total, seconds)
    memory = peak_memory(used, split, filled_order(job, strategy), builder.shares)
    return Simulated(strategy, split, timeline, seconds, total - count, refined, parts, memory)


def order_of(strategy: Strategy, microbatches: int) -> Schedule:
    """Every rank's actions."""
    return strategy.pipeline.order(strategy.pp, microbatches, strategy.virtual)


def filled_order(job: PlanningJob, strategy: Strategy) -> Schedule:
    """The same of the first microbatches of a step, so many that no more are ever in flight."""
    total = job.global_batch // (strategy.dp * strategy.microbatch)
    most = strategy.pipeline.held(strategy.pp, total, strategy.virtual, 0)
    wanted = max(most / strategy.virtual, 2 * strategy.pp)  # twice round: interleaving needs whole rounds
    return order_of(strategy, min(total, ceil(wanted)))


def num_actions(job: PlanningJob, strategy: Strategy) -> int:
    """Actions that simulating a strategy's step takes."""
    total = job.global_batch // (strategy.dp * strategy.microbatch)
    halves = 3 if strategy.pipeline.splits and strategy.pp > 1 else 2
    return halves * strategy.pp * strategy.virtual * fewest_microbatches(strategy, total)


def fewest_microbatches(strategy: Strategy, total: int) -> int:
    """How many microbatches are simulated: all of few, else so many that the pipeline is full for a while."""
    p, v = strategy.pp, strategy.virtual
    if p == 1:
        return min(total, ALONE)
    full = p if v > 1 and strategy.pipeline.rounds else 2 * p  # a round of v chunks fills it too
    # Whole rounds of p: interleaved orders are made for no others.
    wanted = max(MOST_ACTIONS // (2 * p * v), full, 4)
    return min(total, max(wanted // p * p, p))


class _Builder:
    """Parts of every action of one step."""

    def __init__(self, prices: LayerPrices, split: Split, order: Schedule) -> None:
        self.prices, self.split, self.homes = prices, split, prices.strategy.homes
        self.count = max(1, WANTED_PARTS // sum(map(len, order)))
        self.first = {actions[0] for actions in order}
        # Gradients of a rank are whole when its last backward is done, whichever chunk that is of.
        self.last_backward = {[a for a in actions if a.kind in "BW"][-1] for actions in order}
        self.step = step_seconds(prices.table.rows, prices.constants, prices.times)
        self.row = prices.own_row
        self.shares = state_shares(prices, split)
        self.last_stage = len(split.stages) - 1
        self.boundary = prices.boundary_seconds()
        self.known: dict[tuple[str, int], TaskParts] = {}
        self.sent: dict[int, TaskPart] = {}

    def parts(self, action: Action) -> TaskParts:
        """Of an action; the first of a rank brings its states, the last backward hides gradients."""
        key = action.kind, action.stage
        if key not in self.known:
            self.known[key] = TaskParts(self._parts(*key))
        found = self.known[key]
        rank = self.homes[action.stage]
        if action in self.first:
            first = found.parts[0]
            first = first._replace(alloc_bytes=first.alloc_bytes + self._states(rank))
            found = self._beside("parameters", TaskParts([first, *found.parts[1:]], found.output), rank)
        if action in self.last_backward:
            found = self._beside("gradients", found, rank)
        return found

    def _states(self, rank: int) -> float:
        whole, _ = self.prices.static_bytes()
        overhead = self.prices.overhead_bytes()
        return overhead + (whole - overhead) * self.shares[rank]

    def _beside(self, name: str, found: TaskParts, rank: int) -> TaskParts:
        """Half of what is hidden of the data axis travels beside the first forward (updated parameters),
        half beside the last backward."""
        exposed, whole = self._gradients()
        if whole - exposed <= 1e-9:  # no data axis, or nothing of it is hidden
            return found
        demand = self._gradient_demand(rank, whole)
        hidden = TaskPart(name, (whole - exposed) / 2, "comm.dp", name, (), demand)
        return TaskParts([*found.parts, hidden], len(found.parts) - 1)

    def _gradients(self) -> tuple[float, float]:
        exposed = float(self.step.exposed_gradients[self.row])
        rows, constants = self.prices.table.rows, self.prices.constants
        _, whole = gradient_seconds(rows, np.zeros(rows.length), constants)
        return exposed, max(float(whole[self.row]), exposed)

    def _gradient_demand(self, rank: int, seconds: float) -> Mapping[str, float]:
        return self.prices.demand("dp", "all_reduce", rank, seconds, 2.0 * self.prices.row["params"])

    def _parts(self, kind: str, stage: int) -> list[TaskPart]:
        """Parts of layers, one behind another, backward from the last to the first; each brings or takes what
        is saved of it."""
        layers, p = self.split.stages[stage], self.prices
        # Cut finer where actions are few: memory then falls and rises by layers, not by whole stages.
        count = max(1, min(self.count, len(layers)))
        bounds = [round(i * len(layers) / count) for i in range(count + 1)]
        backward = kind != "F"
        places = list(range(count))[:: -1 if backward else 1]
        working = p.working_bytes(stage == self.last_stage) if kind in "BI" else 0.0
        name = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}[kind]
        # The head's three products: one forward, two backward, or one in each half of it.
        share = 2 / 3 if kind == "B" else 1 / 3
        found: list[TaskPart] = []
        for i in places:
            part = layers[bounds[i] : bounds[i + 1]]
            whole, again = self._sum(kind, part)
            kept = sum(p.saved_bytes(action) for _, action in part)
            if stage == self.last_stage and i == count - 1:
                whole = whole.plus(p.head().scaled(share))
            if i == 0:
                kept += edge_bytes(p, stage)
                whole = whole.plus(p.front().scaled(share)) if stage == 0 else whole
            begin = len(found)
            # Before the backward that reads it; memory is taken where the two begin and given back where they
            # end.
            if again.compute > 0.0:
                self._part(found, again, "recompute")
            self._part(found, whole, name)
            taken = (kept if kind == "F" else 0.0) + (working if i == places[0] else 0.0)
            given = (kept if kind in "BW" else 0.0) + (working if i == places[-1] else 0.0)
            found[begin] = found[begin]._replace(alloc_bytes=taken)
            found[-1] = found[-1]._replace(free_bytes=given)
        return found

    def _sum(self, kind: str, layers: Sequence[tuple[int, str]]) -> tuple[Pass, Pass]:
        whole, again = NO_PASS, NO_PASS
        for layer, recompute in layers:
            if kind == "F":
                whole = whole.plus(self.prices.forward(layer, recompute))
            else:
                whole = whole.plus(self.prices.backward(layer, recompute).scaled(1.0 if kind == "B" else 0.5))
            if kind in "BI":
                again = again.plus(self.prices.again(layer, recompute))
        return whole, again

    def _part(self, found: list[TaskPart], one: Pass, kind: str) -> None:
        """Compute with hidden messages beside it, then what is exposed of them."""
        before = (len(found) - 1,) if found else ()
        begin = len(found)
        found.append(TaskPart("" if not found else kind, one.compute, "compute", kind, before))
        for name, stream, seconds, what in (
            ("tp", "comm.tp", one.hidden, "tensor messages"),
            ("dp", "comm.dp", one.hidden_gather, "parameters gathered"),
            ("host", "copy.host", one.hidden_copy, "host copy"),
        ):
            if seconds > 1e-9:
                found.append(TaskPart(name, seconds, stream, what, before))
        for name, stream, seconds, what in (
            ("tp", "comm.tp", one.tensor, "tensor messages"),
            ("ep", "comm.ep", one.experts, "tokens to experts"),
            ("dp", "comm.dp", one.gather, "parameters gathered"),
            ("host", "copy.host", one.copy, "host copy"),
        ):
            if seconds > 1e-9:
                after = tuple(range(begin, len(found)))
                found.append(TaskPart(name, seconds, stream, what, after))
        if len(found) > begin + 1:  # what comes next waits for all of it
            found.append(TaskPart("", 0.0, "compute", "wait", tuple(range(begin, len(found)))))

    def message(self, one: Message) -> TaskPart:
        """What goes to another stage."""
        if one.from_rank not in self.sent:
            num_bytes = self.prices.row["boundary_bytes"]
            demand = self.prices.demand("pp", "send", one.from_rank, self.boundary, num_bytes)
            self.sent[one.from_rank] = TaskPart("", self.boundary, "comm.pp", "stage boundary", None, demand)
        return self.sent[one.from_rank]

    def finish(self, rank: int) -> Sequence[TaskPart]:
        """What is left of gradients, the update, and states that come from host memory."""
        exposed, whole = self._gradients()
        strategy, r = self.prices.strategy, self.prices.row
        found = []
        if exposed > 0.0:
            demand = self._gradient_demand(rank, whole)
            found.append(TaskPart("gradients", exposed, "comm.dp", "gradients", None, demand))
        update = float(self.step.optimizer[self.row])
        copied = 0.0
        if strategy.offload:
            copied = float(self.prices.memory.host[self.row] * r["host_s_byte"])
            copied = min(copied, update)
            found.append(TaskPart("states", copied, "copy.host", "host copy"))
        found.append(TaskPart("update", update - copied, "compute", "update"))
        return found

    def pace(self) -> float:
        """Seconds that one more microbatch takes: those of the rank with most to do."""
        p = self.prices
        busy = [0.0] * p.strategy.pp
        for stage, layers in enumerate(self.split.stages):
            busy[self.homes[stage]] += sum(p.layer(kind, recompute) for kind, recompute in layers)
        head, front = p.head(), p.front()
        busy[self.homes[-1]] += head.compute + head.tensor + head.experts + head.gather
        busy[0] += front.compute + front.tensor + front.experts + front.gather
        return max(busy)

    def parts_of(self, microbatches: int, seconds: float) -> dict[str, float]:
        """Of a step of so many microbatches and seconds."""
        exposed, _ = self._gradients()
        update = float(self.step.optimizer[self.row])
        return time_parts(self.prices, self.split, microbatches, seconds, exposed, update)
