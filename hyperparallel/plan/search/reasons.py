"""Why a strategy is as it is: each of its choices against the nearest other one, priced, in words.

Every sentence comes from two predictions that differ in one choice (and what must follow from it: fewer
tensor-parallel ranks mean more data-parallel ones). Of each choice the least bad alternative is told; those
that would cost most stand first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hyperparallel.cluster.placement import FILLS
from hyperparallel.errors import UserError
from hyperparallel.plan.cost.constants import Constants
from hyperparallel.plan.search.job import Job
from hyperparallel.plan.search.places import moved_axis, place, placements
from hyperparallel.plan.search.pricing import TIME_PARTS, Prediction, predict
from hyperparallel.plan.search.space import (
    EVERYTHING,
    RECOMPUTED,
    Limits,
    Skeleton,
    cuts,
    levels,
    pipelines,
    skeleton_of,
    skeletons,
    zeros,
)
from hyperparallel.plan.strategy import ORDERS, Strategy

LEAST_LOSS = 0.003
PART_WORDS = {
    "compute": "computing",
    "exposed_tensor": "exposed messages between layers",
    "exposed_experts": "exposed tokens to experts",
    "bubble": "bubble",
    "exposed_gradients": "exposed gradients",
    "optimizer": "update",
}


@dataclass(frozen=True)
class Reason:
    """A choice and what the nearest alternative costs: a share of the step's time, or more memory than
    there is (infinite)."""

    choice: str
    instead: str
    loss: float
    words: str


def reasons(
    job: Job,
    best: Prediction,
    objective: str = "time",
    limits: Limits = EVERYTHING,
    constants: Constants | None = None,
    most: int = 6,
) -> list[Reason]:
    """The decisive reasons, those that cost most first; what does not fit comes last, for it is no choice."""
    known = set(skeletons(job, limits))
    places = placements(job, [skeleton_of(best.strategy)], limits)[0]
    changes = [
        (name, s)
        for name, s in neighbours(best.strategy)
        if _allowed(job, s, known, limits) and (name != "order" or (s.order, s.fill) in places)
    ]
    predictions = predict(job, [s for _, s in changes], constants or Constants())
    nearest: dict[str, Reason] = {}
    for (name, _), other in zip(changes, predictions, strict=True):
        one = _reason(job, name, best, other, objective)
        if one is not None and (name not in nearest or one.loss < nearest[name].loss):
            nearest[name] = one
    told = [one for one in nearest.values() if one.loss >= LEAST_LOSS]
    told.sort(key=lambda one: (-one.loss if one.loss != float("inf") else 0.0, one.words))
    return told[:most]


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
                if values.get("tp", s.tp) == 1:
                    values["sp"] = False
                elif s.tp == 1:
                    values["sp"] = True
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
    for virtual, schedule in ((1, "1f1b"), (2, "1f1b"), (4, "1f1b"), (1, "zb-h1")):
        if (virtual, schedule) != (s.virtual, s.schedule):
            for one in changed(virtual=virtual, schedule=schedule):
                yield "schedule", one


def _allowed(job: Job, s: Strategy, known: set[Skeleton], limits: Limits) -> bool:
    skeleton = skeleton_of(s)
    return (
        skeleton in known
        and (s.virtual, s.schedule) in pipelines(job, skeleton, limits)
        and s.zero in zeros(job, skeleton, limits)
        and s.sp in cuts(skeleton, limits)
        and (s.recompute, s.offload) in levels(job, limits)
    )


def _reason(job: Job, name: str, best: Prediction, other: Prediction, objective: str) -> Reason | None:
    choice, instead = _said(job, name, best.strategy, other.strategy)
    capacity = job.cluster.capacity_bytes
    host = job.cluster.tier("host").capacity_per_device_bytes if job.cluster.has_tier("host") else 0.0
    if other.peak_bytes > capacity or other.host_bytes > host:
        need, room, where = other.peak_bytes, capacity, "device"
        if other.peak_bytes <= capacity:
            need, room, where = other.host_bytes, host, "share of the host"
        words = f"{choice}: {instead} would need {need / 1e9:.1f} GB of a {where}'s {room / 1e9:.1f} GB"
        return Reason(choice, instead, float("inf"), words)
    if objective == "memory":
        loss = other.peak_bytes / best.peak_bytes - 1.0
        words = f"{choice}: {instead} needs {(other.peak_bytes - best.peak_bytes) / 1e9:.2f} GB more"
        return Reason(choice, instead, loss, words) if loss >= LEAST_LOSS else None
    loss = other.seconds / best.seconds - 1.0
    if loss < LEAST_LOSS:
        return None
    part, saved = max(((p, other.parts[p] - best.parts[p]) for p in TIME_PARTS), key=lambda item: item[1])
    share = saved / best.seconds
    words = f"{choice}: {instead} is {loss:.1%} slower ({PART_WORDS[part]} +{share:.1%} of the step)"
    return Reason(choice, instead, loss, words)


def _said(job: Job, name: str, best: Strategy, other: Strategy) -> tuple[str, str]:
    """The choice and its alternative in words, with where an axis lies."""
    if name in ("tp", "cp", "ep"):
        changes = [f"{a}{getattr(other, a)}" for a in (name, "tp", "cp", "pp", "dp")]
        moved = [text for a, text in zip((name, "tp", "cp", "pp", "dp"), changes, strict=True)
                 if getattr(other, a) != getattr(best, a)]  # fmt: skip
        at = place(job, best, name)
        return (
            f"{name}{getattr(best, name)}{at}",
            f"{' '.join(dict.fromkeys(moved))}{place(job, other, name)}",
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
        here, there = (f"{axis}{getattr(s, axis)}{place(job, s, axis)}" for s in (best, other))
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
    return f"{s.virtual} chunks a stage" if s.virtual > 1 else s.schedule


def loses(best: Prediction, other: Prediction) -> str:
    """What the runner-up loses, part by part."""
    loss = other.seconds / best.seconds - 1.0
    parts = sorted(
        ((p, (other.parts[p] - best.parts[p]) / best.seconds) for p in TIME_PARTS), key=lambda x: -abs(x[1])
    )
    said = [f"{PART_WORDS[p]} {share:+.1%}" for p, share in parts if abs(share) >= 0.001][:3]
    memory = (other.peak_bytes - best.peak_bytes) / 1e9
    text = f"{other.strategy.words()}: {loss:+.1%} time in closed form"
    if said:
        text += f" ({', '.join(said)})"
    return f"{text}, {memory:+.1f} GB" if abs(memory) >= 0.1 else text
