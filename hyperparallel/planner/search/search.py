"""The best strategies of a job: enumerate, prune, price in closed form, keep the best.

A large space is searched in two passes. The first prices every skeleton (`space.py`) in its usual form:
sequence parallelism, data axis inside the pipeline, ZeRO-1 and 3, any number of chunks, and of recomputation
and offload what is needed to fit. The second tries everything inside the best `REFINED` skeletons but other
placements of their axes; of what is best then, all placements are priced, and the `PLACED` skeletons that are
best so are searched once more with all of everything. A space with no more skeletons than `PLACED` goes
through that pass only, so nothing is left out.

    minimise     seconds(s, i), then peak bytes, then what is harder to run   `rank_key`
                 (peak bytes first for the objective "memory")
    over         skeletons s = (tp, cp, pp, dp, ep, etp, microbatch)          `space.skeletons`
                 and what varies inside one, i = (virtual, schedule,          `space.pipelines`,
                 zero, sp, recompute, offload, order, fill)                   `zeros`, `levels`, ...
    subject to   tp cp pp dp = devices, dp microbatch | batch, ...            `space.skeletons`
                 bytes(s, i) <= capacity of a device                          `table.fits`
                 host bytes(s, i) <= its share of the host                    `table.fits`
    with         seconds = m t_longest + idle + gradients + update            `price.step_seconds`
                 bytes = states + activations in flight + working memory      `memory.memory_of`

Dominance: of two strategies that differ only in recomputation and offload, and both fit, the one with less of
both is never slower (`minimal`), so the first pass prices nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from hyperparallel.cluster.axis_links import FILLS
from hyperparallel.errors import PlanError
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.memory import Memory
from hyperparallel.planner.cost.price import StepTime
from hyperparallel.planner.cost.work import Array
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.axis_order import AxisOrder, axis_orders
from hyperparallel.planner.search.space import (
    EVERYTHING,
    RECOMPUTED,
    Limits,
    Skeleton,
    levels,
    norm_cuts,
    pipelines,
    skeleton_of,
    skeletons,
    zeros,
)
from hyperparallel.planner.search.table import Prediction, StrategyTable, predict, prediction, schedule_code
from hyperparallel.planner.strategy import ORDERS, RECOMPUTE, Candidates, Strategy

Objective = Literal["time", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("time", "memory", "cost")
REFINED, PLACED = 160, 32
CHUNK = 4096


@dataclass(frozen=True)
class SearchResult:
    """The best strategies of different skeletons, best first, and how many were looked at and fitted;
    evaluated: the best of every skeleton that was searched with all of everything, `best` among them."""

    best: tuple[Prediction, ...]
    considered: int
    fitting: int
    evaluated: tuple[Prediction, ...] = ()


def search(
    job: PlanningJob,
    objective: Objective = "time",
    limits: Limits = EVERYTHING,
    constants: Constants | None = None,
    keep: int = 32,
) -> SearchResult:
    """The best strategies for a job; `SearchResult.best` is empty where nothing fits.

    objective: "time" for the shortest step, "memory" for the smallest peak; "cost" is "time" at a fixed
    number of devices. Raises `PlanError` where no strategy serves the number of devices at all.
    """
    used = constants or Constants()
    every = skeletons(job, limits)
    if not every:
        raise _no_factors(job, limits)
    chosen, considered = every, 0
    # The first pass only decides which skeletons are looked at closely: what it says of them is not kept, for
    # placements and cuts that it did not try may turn the order round.
    if len(every) > REFINED:
        values, considered = _first_pass(job, every, objective, limits, used)
        order = np.argsort(values, kind="stable")[:REFINED]
        chosen = [every[int(i)] for i in order if np.isfinite(values[i])]
    if not chosen:
        return SearchResult((), considered, 0)
    places = dict(zip(chosen, axis_orders(job, chosen, limits), strict=True))
    best: list[Prediction] = []
    fitting = 0
    if len(every) > PLACED:
        # Placement multiplies the space by up to 15 and rarely changes which sizes are best, so that only the
        # sizes that are best in some placement get the whole product.
        first = {s: ones[:1] for s, ones in places.items()}
        best, more, fitting = _second_pass(job, first, objective, limits, used)
        considered += more
        ordered = _by_best_place(job, best, places, objective, used)
        places = {s: places[s] for s in ordered[:PLACED]}
    again, more, others = _second_pass(job, places, objective, limits, used)
    best = again + [p for p in best if skeleton_of(p.strategy) not in places]
    best.sort(key=lambda p: rank_key(p, objective))
    return SearchResult(tuple(best[:keep]), considered + more, fitting + others, tuple(best))


def _by_best_place(
    job: PlanningJob,
    best: Sequence[Prediction],
    places: Mapping[Skeleton, Sequence[AxisOrder]],
    objective: Objective,
    constants: Constants,
) -> list[Skeleton]:
    """The skeletons of some predictions, sorted by the best that another placement makes of each."""
    sizes = [skeleton_of(p.strategy) for p in best]
    every = [
        replace(p.strategy, order=order, fill=fill)
        for s, p in zip(sizes, best, strict=True)
        for order, fill in places[s]
    ]
    keys: dict[Skeleton, tuple[float, ...]] = {}
    for p in predict(job, every, constants):
        s, key = skeleton_of(p.strategy), rank_key(p, objective)
        keys[s] = min(keys.get(s, key), key)
    return sorted(keys, key=lambda s: keys[s])


def rank_key(p: Prediction, objective: Objective) -> tuple[float, ...]:
    """What plans are sorted by: the objective, then what is simpler to run."""
    first, second = round(p.seconds, 9), round(p.peak_bytes)
    values = (second, first) if objective == "memory" else (first, second)
    s = p.strategy
    return (*values, s.zero, ORDERS.index(s.order), FILLS.index(s.fill), s.virtual)


def _columns(rows: Sequence[Skeleton], job: PlanningJob, **more: object) -> Candidates:
    sizes = np.array(rows, float).reshape(-1, len(Skeleton._fields))
    named = {name: sizes[:, i] for i, name in enumerate(Skeleton._fields)}
    return Candidates(**named, dtype=job.dtype, **more)


def _first_pass(
    job: PlanningJob, every: Sequence[Skeleton], objective: Objective, limits: Limits, constants: Constants
) -> tuple[Array, int]:
    """The objective of every skeleton in its usual form, infinite where nothing fits."""
    values = np.full(len(every), np.inf)
    considered = 0
    grid = levels(job, limits)
    for start in range(0, len(every), CHUNK):
        part = every[start : start + CHUNK]
        for zero in limits.allowed("zero", [1, 3]) or [2]:
            known = [zero in zeros(job, s, limits) for s in part]
            at = np.flatnonzero(known)
            if not len(at):
                continue
            found = _usual(job, [part[int(i)] for i in at], zero, limits, objective, constants)
            values[start + at] = np.minimum(values[start + at], found)
            considered += len(at) * len(grid)
    return values, considered


def _usual(
    job: PlanningJob,
    part: Sequence[Skeleton],
    zero: int,
    limits: Limits,
    objective: Objective,
    constants: Constants,
) -> Array:
    """The best objective of each skeleton with this ZeRO stage."""
    count, grid = len(part), levels(job, limits)
    names = [r for r in RECOMPUTED if any(r == recompute for recompute, _ in grid)]
    tp = np.array([s.tp for s in part] * len(names), float)
    codes = np.repeat([float(RECOMPUTE.index(r)) for r in names], count)
    table = StrategyTable(
        job, _columns(list(part) * len(names), job, sp=tp > 1, zero=zero, recompute=codes), constants
    )
    shares = sorted({share for _, share in grid})
    good = np.stack([table.fits(table.memory(offload=s)).reshape(len(names), count) for s in shares])
    values = np.full(count, np.inf)
    if objective == "memory":
        for share in shares:
            total = table.memory(offload=share).total.reshape(len(names), count)
            values = np.minimum(values, np.where(good[shares.index(share)], total, np.inf).min(axis=0))
        return values
    # [offload, recompute, skeleton]: memory falls along both, so that the minimal cells are a staircase.
    wanted = minimal(good)
    keep = np.flatnonzero(wanted.any(axis=0).ravel())
    if not len(keep):
        return values
    offload = np.array(shares)[wanted.argmax(axis=0)].ravel()[keep]
    priced = StrategyTable(job, table.candidates.take(keep), constants)
    owner = keep % count
    allowed = [set(pipelines(job, s, limits)) for s in part]
    # Kernels and messages were priced once above; each pipeline only changes how they add up.
    for virtual, schedule in sorted(set().union(*allowed)):
        valid = np.array([(virtual, schedule) in each for each in allowed])[owner]
        columns = {"virtual": virtual, "schedule": schedule_code(schedule), "offload": offload}
        room = valid & priced.fits(priced.memory(**columns))
        if room.any():
            np.minimum.at(values, owner, np.where(room, priced.step(**columns).seconds, np.inf))
    return values


def minimal(good: Array) -> Array:
    """Of what fits [offload, recompute, ...], what has nothing below it in both that fits too."""
    wanted: Array = good.copy()
    for offload, recompute in product(range(good.shape[0]), range(good.shape[1])):
        below = good[: offload + 1, : recompute + 1].reshape(-1, *good.shape[2:])[:-1]
        if len(below):
            wanted[offload, recompute] &= ~below.any(axis=0)
    return wanted


def _second_pass(
    job: PlanningJob,
    places: Mapping[Skeleton, Sequence[AxisOrder]],
    objective: Objective,
    limits: Limits,
    constants: Constants,
) -> tuple[list[Prediction], int, int]:
    """The best strategy of every skeleton, of all there are in these places; (best, considered, fitting)."""
    chosen = list(places)
    grid = levels(job, limits)
    names = list(dict.fromkeys(recompute for recompute, _ in grid))
    shares = sorted({share for _, share in grid})
    strategies: list[Strategy] = []
    owners: list[int] = []
    for i, s in enumerate(chosen):
        same = {**s._asdict(), "dtype": job.dtype}
        inside = product(norm_cuts(s, limits), places[s], zeros(job, s, limits), names)
        for sp, (order, fill), zero, recompute in inside:
            more: dict[str, Any] = {"sp": sp, "order": order, "zero": zero, "recompute": recompute}
            strategies.append(Strategy(**same, fill=fill, **more))
            owners.append(i)
    if not strategies:
        return [], 0, 0
    owner = np.array(owners)
    allowed = [set(pipelines(job, s, limits)) for s in chosen]
    table = StrategyTable(job, Candidates.of(strategies), constants)
    best: list[Prediction | None] = [None] * len(chosen)
    considered = fitting = 0
    for (virtual, schedule), share in product(sorted(set().union(*allowed)), shares):
        valid = np.array([(virtual, schedule) in each for each in allowed])[owner]
        columns = {"virtual": virtual, "schedule": schedule_code(schedule), "offload": share}
        memory = table.memory(**columns)
        room = valid & table.fits(memory)
        considered, fitting = considered + int(valid.sum()), fitting + int(room.sum())
        if not room.any():
            continue
        step = table.step(**columns)
        for index in _best_of_each(owner, room, step, memory, objective):
            changed = _changed(strategies[index], virtual, schedule, share)
            one = prediction(changed, step, memory, index)
            old = best[owner[index]]
            if old is None or rank_key(one, objective) < rank_key(old, objective):
                best[owner[index]] = one
    return [one for one in best if one is not None], considered, fitting


def _best_of_each(
    owner: Array, room: Array, step: StepTime, memory: Memory, objective: Objective
) -> list[int]:
    """The position of the best fitting row of each owner."""
    # Rounded as in `rank_key`: equal plans must tie here too, or the order of rows would decide.
    seconds, total = np.round(step.seconds, 9), np.round(memory.total)
    keys = (total, seconds) if objective == "memory" else (seconds, total)
    at = np.flatnonzero(room)
    order = at[np.lexsort((keys[1][at], keys[0][at], owner[at]))]
    first = np.concatenate([[True], owner[order][1:] != owner[order][:-1]])
    return [int(i) for i in order[first]]


def _changed(strategy: Strategy, virtual: int, schedule: str, offload: float) -> Strategy:
    values = {**strategy.__dict__, "virtual": virtual, "schedule": schedule, "offload": offload}
    return Strategy(**values)


def _no_factors(job: PlanningJob, limits: Limits) -> PlanError:
    """Devices or batch that nothing divides, and the nearest numbers that work."""

    def works(devices: int, batch: int) -> bool:
        try:
            other = PlanningJob(job.model, job.cluster.resized(devices), job.seq, batch, job.dtype)
        except ValueError:
            return False
        return bool(skeletons(other, limits))

    def near(number: int) -> list[int]:
        return sorted(range(max(1, number - 64), number + 65), key=lambda k: abs(k - number))

    batches = [b for b in near(job.global_batch) if works(job.devices, b)][:1]
    devices = [d for d in near(job.devices) if works(d, job.global_batch)][:2]
    given = f"{job.devices} devices for {job.model.name} and {job.global_batch} samples a step"
    if limits.runnable or limits.fixed:
        given += ", with the sizes that were fixed"
    allowed = (
        f"tp * cp * pp * dp that multiply to the devices: tp divides {_heads(job)} heads, pp at most "
        f"{job.model.num_layers} layers, dp divides the samples"
    )
    said = [f"--global-batch {b}" for b in batches] + [f"--devices {d}" for d in sorted(devices)]
    return PlanError("devices", given, allowed, " or ".join(said) or None)


def _heads(job: PlanningJob) -> str:
    heads = {layer.attention.heads for layer, _ in job.model.kinds if layer.attention is not None}
    return "/".join(map(str, sorted(heads))) or "no"
