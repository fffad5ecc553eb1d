"""Why a strategy is as it is: each of its choices against the best plan that chose otherwise, in words.

The best is looked for among all that the search evaluated and among the neighbours of the best few: plans
that differ in one choice (and what must follow from it: fewer tensor-parallel ranks mean more data-parallel
ones). Two plans that were simulated are compared by that, all others in closed form. Choices that would cost
most stand first; one that another plan does better by either number is no reason and is not told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hyperparallel.cluster.axis_links import FILLS
from hyperparallel.errors import UserError
from hyperparallel.mpmd import SCHEDULES
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.axis_order import axis_orders, moved_axis, place_words
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
from hyperparallel.planner.search.table import Prediction, predict
from hyperparallel.planner.strategy import ORDERS, Strategy

LEAST_LOSS = 0.003
NEAR = 16
"""Of so many of the best plans neighbours are looked at."""

FIELDS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "ep": ("ep",),
    "etp": ("etp",),
    "microbatch": ("microbatch",),
    "zero": ("zero",),
    "sp": ("sp",),
    "recompute": ("recompute",),
    "offload": ("offload",),
    "order": ("order", "fill"),
    "schedule": ("virtual", "schedule"),
}
"""Fields of a strategy that a choice sets."""

NONE_SHOWN: Mapping[Strategy, Prediction] = {}
PART_WORDS = {
    "compute": "computing",
    "exposed_tensor": "exposed messages between layers",
    "exposed_host": "exposed copies to host memory",
    "exposed_experts": "exposed tokens to experts",
    "bubble": "bubble",
    "exposed_gradients": "exposed gradients",
    "optimizer": "update",
}


@dataclass(frozen=True)
class Reason:
    """A choice and what the best alternative costs: a share of the step's time, or more memory than there is
    (infinite)."""

    choice: str
    instead: str
    loss: float
    words: str


def reasons(
    job: PlanningJob,
    best: Prediction,
    objective: str = "time",
    limits: Limits = EVERYTHING,
    constants: Constants | None = None,
    most: int = 6,
    found: Sequence[Prediction] = (),
    shown: Mapping[Strategy, Prediction] = NONE_SHOWN,
) -> list[Reason]:
    """The decisive reasons, those that cost most first; what does not fit comes last, for it is no choice.

    found: what a search evaluated, best first. shown: what is told of strategies that were simulated.
    """
    used = constants or Constants()
    near = _near(job, best, limits, used)
    pool = [*near, *_others_near(job, best, found, limits, used), *found]
    told = []
    for name in FIELDS:
        fitting = [p for p in pool if _chose_otherwise(name, best.strategy, p.strategy) and _fits(job, p)]
        if fitting:
            other = min(fitting, key=lambda p: _cost(best, p, objective, shown))
            here, there = _basis(best, other, shown)
            basis = _basis_words(best, here, shown)
            one = _reason(job, name, here, there, objective, any(other is p for p in near), basis)
        else:
            one = _too_large(job, name, best, near)
        if one is not None:
            told.append(one)
    told.sort(key=lambda one: (-one.loss if one.loss != float("inf") else 0.0, one.words))
    return told[:most]


def _near(job: PlanningJob, best: Prediction, limits: Limits, constants: Constants) -> list[Prediction]:
    """What differs in one choice, in every place that it may take."""
    known = set(skeletons(job, limits))
    places = axis_orders(job, [skeleton_of(best.strategy)], limits)[0]
    changed = [
        s
        for name, s in neighbours(best.strategy)
        if _allowed(job, s, known, limits) and (name != "order" or (s.order, s.fill) in places)
    ]
    return predict(job, list(dict.fromkeys(changed)), constants)


def _others_near(
    job: PlanningJob, best: Prediction, found: Sequence[Prediction], limits: Limits, constants: Constants
) -> list[Prediction]:
    """The same of the next best, in what a search does not keep beside the best of the same sizes."""
    known = {skeleton_of(p.strategy) for p in found}
    changed = [
        s
        for p in found[:NEAR]
        if p.strategy != best.strategy
        for name, s in neighbours(p.strategy)
        if name in ("zero", "sp", "recompute", "offload", "schedule") and _allowed(job, s, known, limits)
    ]
    return predict(job, list(dict.fromkeys(changed)), constants)


def _chose_otherwise(name: str, best: Strategy, other: Strategy) -> bool:
    """Whether a strategy decides differently where the best one had a choice that can be compared."""
    if all(getattr(best, field) == getattr(other, field) for field in FIELDS[name]):
        return False
    return {
        "sp": best.tp > 1 and other.tp > 1,
        "etp": best.ep > 1 or best.etp > 1 or other.etp > 1,
        "schedule": best.pp > 1 and other.pp > 1,
        "order": skeleton_of(best) == skeleton_of(other),
    }.get(name, True)


def _basis(
    best: Prediction, other: Prediction, shown: Mapping[Strategy, Prediction]
) -> tuple[Prediction, Prediction]:
    """Both simulated, where both were, else both in closed form."""
    if best.strategy in shown and other.strategy in shown:
        return shown[best.strategy], shown[other.strategy]
    return best, other


def _basis_words(best: Prediction, used: Prediction, shown: Mapping[Strategy, Prediction]) -> str:
    """How a comparison was made, where the other way would say something else of the best."""
    told = shown.get(best.strategy, best)
    if used is not best:
        return " in the simulation"
    return " in closed form" if abs(told.seconds / best.seconds - 1.0) > LEAST_LOSS else ""


def _cost(
    best: Prediction, other: Prediction, objective: str, shown: Mapping[Strategy, Prediction]
) -> float:
    here, there = _basis(best, other, shown)
    if objective == "memory":
        return there.peak_bytes / here.peak_bytes
    return there.seconds / here.seconds


def neighbours(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """(choice, strategy) with one choice changed, and data or pipeline parallelism following."""
    s = strategy

    def changed(**values: Any) -> Iterator[Strategy]:
        try:
            yield replace(s, **values)
        except UserError:
            return

    for axis in ("tp", "cp", "pp"):
        size = getattr(s, axis)
        for other, follows in (
            (o, f) for o in (2 * size, size // 2, size // 4) for f in ("dp", "pp", "tp", "cp")
        ):
            if other < 1 or follows == axis:
                continue
            rest = getattr(s, follows) * size
            if rest % other == 0:
                values = {axis: other, follows: rest // other}
                # Without tensor parallelism there is nothing to cut norms over; with it that is the usual
                # form.
                if values.get("tp", s.tp) == 1:
                    values["sp"] = False
                elif s.tp == 1:
                    values["sp"] = True
                # Without a pipeline there is no schedule, and no order that differs by it.
                if values.get("pp", s.pp) == 1:
                    values |= {"virtual": 1, "schedule": "1f1b", "order": ORDERS[0]}
                for one in changed(**values):
                    yield axis, one
    for name, options in (
        ("ep", (2 * s.ep, s.ep // 2)),
        ("etp", (1, s.tp)),
        ("microbatch", (2 * s.microbatch, s.microbatch // 2)),
        ("zero", (1, 2, 3)),
        ("sp", (not s.sp,)),
        ("recompute", RECOMPUTED),
        ("offload", (0.0, 1.0)),
    ):
        for option in options:
            if option != getattr(s, name) and (isinstance(option, str) or option >= 0):
                for one in changed(**{name: option}):
                    yield name, one
    for order, fill in product(ORDERS, FILLS):
        if (order, fill) != (s.order, s.fill):
            yield "order", replace(s, order=order, fill=fill)
    for record in SCHEDULES.values():
        for virtual in record.usual_chunks:
            if record.searched and (virtual, record.name) != (s.virtual, s.schedule):
                for one in changed(virtual=virtual, schedule=record.name):
                    yield "schedule", one


def _allowed(job: PlanningJob, s: Strategy, known: set[Skeleton], limits: Limits) -> bool:
    skeleton = skeleton_of(s)
    return (
        skeleton in known
        and (s.virtual, s.schedule) in pipelines(job, skeleton, limits)
        and s.zero in zeros(job, skeleton, limits)
        and s.sp in norm_cuts(skeleton, limits)
        and (s.recompute, s.offload) in levels(job, limits)
    )


def _fits(job: PlanningJob, p: Prediction) -> bool:
    return p.peak_bytes <= job.cluster.capacity_bytes and p.host_bytes <= _host_room(job)


def _host_room(job: PlanningJob) -> float:
    return job.cluster.tier("host").capacity_per_device_bytes if job.cluster.has_tier("host") else 0.0


def _too_large(job: PlanningJob, name: str, best: Prediction, near: Sequence[Prediction]) -> Reason | None:
    """Where no other choice fits: what the smallest of them would need."""
    others = [p for p in near if _chose_otherwise(name, best.strategy, p.strategy)]
    if not others:
        return None
    other = min(others, key=lambda p: p.peak_bytes)
    choice, instead = _said(job, name, best.strategy, other.strategy)
    need, room, where = other.peak_bytes, job.cluster.capacity_bytes, "device"
    if need <= room:
        need, room, where = other.host_bytes, _host_room(job), "share of the host"
    words = f"{choice}: {instead} would need {need / 1e9:.1f} GB of a {where}'s {room / 1e9:.1f} GB"
    return Reason(choice, instead, float("inf"), words)


def _reason(
    job: PlanningJob, name: str, best: Prediction, other: Prediction, objective: str, near: bool, basis: str
) -> Reason | None:
    choice, instead = _said(job, name, best.strategy, other.strategy)
    if not near:
        instead = f"the best with {_value(name, other.strategy)} ({other.strategy.words()})"
    if objective == "memory":
        loss = other.peak_bytes / best.peak_bytes - 1.0
        words = f"{choice}: {instead} needs {(other.peak_bytes - best.peak_bytes) / 1e9:.2f} GB more"
        return Reason(choice, instead, loss, words) if loss >= LEAST_LOSS else None
    loss = other.seconds / best.seconds - 1.0
    if loss < LEAST_LOSS:
        return None
    part, share = max(part_shares(best, other).items(), key=lambda item: item[1])
    words = f"{choice}: {instead} is {loss:.1%} slower{basis} ({PART_WORDS[part]} +{share:.1%} of the step)"
    return Reason(choice, instead, loss, words)


def part_shares(best: Prediction, other: Prediction) -> dict[str, float]:
    """What each part of another step takes more, as a share of the best step."""
    names = dict.fromkeys([*best.parts, *other.parts])
    return {n: (other.parts.get(n, 0.0) - best.parts.get(n, 0.0)) / best.seconds for n in names}


def _value(name: str, s: Strategy) -> str:
    """What a strategy chose, in words, without where it lies."""
    if name in ("tp", "cp", "pp", "ep"):
        return f"{name}{getattr(s, name)}"
    return _schedule(s) if name == "schedule" else _choice(name, s)


def _said(job: PlanningJob, name: str, best: Strategy, other: Strategy) -> tuple[str, str]:
    """The choice and its alternative in words, with where an axis lies."""
    if name in ("tp", "cp", "ep"):
        changes = [f"{a}{getattr(other, a)}" for a in (name, "tp", "cp", "pp", "dp")]
        moved = [text for a, text in zip((name, "tp", "cp", "pp", "dp"), changes, strict=True)
                 if getattr(other, a) != getattr(best, a)]  # fmt: skip
        at = place_words(job, best, name)
        return (
            f"{name}{getattr(best, name)}{at}",
            f"{' '.join(dict.fromkeys(moved))}{place_words(job, other, name)}",
        )
    if name == "pp":
        moved = [f"{a}{getattr(other, a)}" for a in ("pp", "tp", "cp", "dp")
                 if getattr(other, a) != getattr(best, a)]  # fmt: skip
        return f"pp{best.pp}", " ".join(moved)
    if name == "schedule":
        return _schedule(best), _schedule(other)
    if name == "order":
        axis = moved_axis(job, best, other)
        if axis is None:
            return " ".join(best.placement_words()) or "axes as usual", " ".join(other.placement_words())
        here, there = (f"{axis}{getattr(s, axis)}{place_words(job, s, axis)}" for s in (best, other))
        return here, there
    return _choice(name, best), _choice(name, other)


def _choice(name: str, s: Strategy) -> str:
    """One field of a strategy as a sentence says it."""
    return {
        "etp": f"experts cut by {s.etp}" if s.etp > 1 else "whole experts",
        "microbatch": f"microbatches of {s.microbatch}",
        "zero": f"zero{s.zero}",
        "sp": "sequence parallelism" if s.sp else "no sequence parallelism",
        "recompute": f"{s.recompute} recomputation" if s.recompute != "none" else "activations kept",
        "offload": f"optimizer states {'in host memory' if s.offload else 'on the device'}",
    }[name]


def _schedule(s: Strategy) -> str:
    return f"{s.virtual} chunks a stage" if len(s.pipeline.usual_chunks) > 1 and s.virtual > 1 else s.schedule


def loses(best: Prediction, other: Prediction, objective: str = "time") -> str:
    """What the runner-up loses, part by part, in the numbers that these two hold."""
    loss = other.seconds / best.seconds - 1.0
    parts = sorted(part_shares(best, other).items(), key=lambda item: -abs(item[1]))
    said = [f"{PART_WORDS[p]} {share:+.1%}" for p, share in parts if abs(share) >= 0.001][:3]
    memory = (other.peak_bytes - best.peak_bytes) / 1e9
    time = f"{loss:+.1%} time simulated" + (f" ({', '.join(said)})" if said else "")
    room = [f"{memory:+.1f} GB"] if abs(memory) >= 0.1 or objective == "memory" else []
    return ", ".join([*room, time] if objective == "memory" else [time, *room])
