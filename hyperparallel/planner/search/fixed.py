"""Fixed fields that no strategy of a job's space has: refused before the search, with the nearest value.

Each field is checked alone, against the widest range that it has in `space.py`; sizes that only fail together
(tp and pp that multiply to more than the devices) are left to the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperparallel.errors import PlanError, nearest
from hyperparallel.mpmd import SCHEDULES
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.space import (
    CHUNKS_A_STAGE,
    RECOMPUTED,
    Limits,
    context_sizes,
    divisors,
    expert_sizes,
    microbatches,
    num_experts,
    stages,
    tensor_sizes,
)
from hyperparallel.planner.strategy import ORDERS

VALUES: dict[str, Sequence[Any]] = {
    "zero": (1, 2, 3),
    "recompute": RECOMPUTED,
    "schedule": tuple(record.name for record in SCHEDULES.values() if record.searched),
    "virtual": CHUNKS_A_STAGE,
    "offload": (0.0, 1.0),
    "order": ORDERS,
}
"""Of the fields whose values no job changes, those that are searched (why no others, in `space.py`)."""


def check_value(name: str, value: Any) -> None:
    """Raise `PlanError` for a value that no job's space holds.

    >>> check_value("zero", 3)
    """
    _refuse_others(name, value, VALUES.get(name, (value,)), "")


def check_fixed(job: PlanningJob, limits: Limits) -> None:
    """Raise `PlanError` for a fixed field whose value no strategy of this job has."""
    for name, value in limits.fixed:
        check_value(name, value)
        possible, why = _possible(job, name, limits.runnable)
        _refuse_others(name, value, possible or (value,), why)


def _possible(job: PlanningJob, name: str, runnable: bool) -> tuple[Sequence[Any], str]:
    """Values of a field in this job's space, empty for any, and what decides them."""
    model, devices, batch = job.model, job.devices, job.global_batch
    plain: dict[str, Any] = {"cp": 1, "pp": 1, "ep": 1, "etp": 1, "recompute": "none", "offload": 0.0}
    if runnable and name in plain:
        return (plain[name],), "what the executor runs today (--runnable)"
    if name == "tp":
        return tensor_sizes(model, devices), f"divide {devices:,} devices and the layers of {model.name}"
    if name == "cp":
        return context_sizes(job, devices), f"divide {devices:,} devices and cut {job.seq:,} tokens evenly"
    if name == "pp":
        return stages(model, devices), f"divide {devices:,} devices, {model.num_layers} layers at most"
    if name == "dp":
        sizes = [d for d in divisors(devices) if batch % d == 0]
        return sizes, f"divide {devices:,} devices and {batch:,} samples a step"
    if name == "ep":
        experts = num_experts(model)
        return sorted({ep for ep, _ in expert_sizes(experts, 1, devices)}), f"divide {experts} experts"
    if name == "microbatch":
        pieces = job.seq // max(context_sizes(job, devices))
        return microbatches(batch, pieces), f"powers of two that divide {batch:,} samples a step"
    if name == "offload" and not job.cluster.has_tier("host"):
        return (0.0,), f"{job.cluster.name} has no memory tier named host"
    return (), ""


def _refuse_others(name: str, value: Any, possible: Sequence[Any], why: str) -> None:
    if value in possible:
        return
    if isinstance(value, str):
        near = nearest(value, possible, 1) or (possible[0] if len(possible) == 1 else None)
    else:
        # Numbers have a nearest one; names are compared by their letters.
        near = min(possible, key=lambda known: abs(known - value))
    allowed = f"{name} of {', '.join(map(str, possible))}" + (f" ({why})" if why else "")
    raise PlanError("--fix", f"{name}={value}", allowed, None if near is None else f"{name}={near}")
