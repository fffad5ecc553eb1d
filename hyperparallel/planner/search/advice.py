"""A model that fits on no plan: by how much, and what would make it fit.

Levers are added one by one, each on top of those before it: all that the search may do (recomputation,
ZeRO-3, optimizer states in host memory), then what it may not yet: gradients and parameters in host memory
as well, everything on disk, more devices of the same kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hyperparallel.errors import ClusterError, PlanError
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.job import PlanningJob, default_batch
from hyperparallel.planner.search.space import (
    EVERYTHING,
    RECOMPUTED,
    Limits,
    levels,
    norm_cuts,
    skeletons,
    zeros,
)
from hyperparallel.planner.search.table import Prediction, StrategyTable, prediction
from hyperparallel.planner.strategy import Candidates, Strategy

MOST_DOUBLINGS = 14
SAMPLED = 400
"""Skeletons looked at for the smallest memory, evenly over the space."""


def smallest(job: PlanningJob, limits: Limits, offload: float, constants: Constants) -> Prediction | None:
    """The strategy that needs the least device memory with this share of optimizer states offloaded."""
    every = skeletons(job, limits)
    if not every:
        return None
    step = max(1, len(every) // SAMPLED)
    names = [r for r in RECOMPUTED if any(r == one for one, _ in levels(job, limits))]
    strategies = []
    for s in every[::step]:
        zero, sp = max(zeros(job, s, limits), default=1), any(norm_cuts(s, limits))
        more: dict[str, Any] = {**s._asdict(), "recompute": names[-1], "dtype": job.dtype}
        strategies.append(Strategy(**more, zero=zero, sp=sp))
    table = StrategyTable(job, Candidates.of([replace(s, offload=offload) for s in strategies]), constants)
    memory = table.memory()
    i = int(np.argmin(memory.total))
    return prediction(table.candidates[i], table.step(), memory, i)


def too_large(job: PlanningJob, limits: Limits, constants: Constants) -> PlanError:
    """The error for a job of which no strategy fits."""
    capacity = job.cluster.capacity_bytes
    has_host = job.cluster.has_tier("host")
    kept = smallest(job, limits, 0.0, constants)
    assert kept is not None, "a job without strategies is refused before"
    over = kept.peak_bytes - capacity
    made_of = ", ".join(f"{name} {_gb(value)}" for name, value in kept.memory.items() if value > 0.05e9)
    given = (
        f"{job.words()}: the smallest plan without offload ({kept.strategy.words()}) needs "
        f"{_gb(kept.peak_bytes)} a device, {_gb(over)} more than its {_gb(capacity)} ({made_of})"
    )
    tried = []
    if limits.runnable:
        free = smallest(job, EVERYTHING, 1.0 if has_host else 0.0, constants)
        if free is not None and free.peak_bytes <= capacity and _host_fits(job, free.host_bytes):
            tried.append(f"without --runnable {free.strategy.words()} fits in {_gb(free.peak_bytes)}")
    elif has_host:
        tried += _offloading(job, kept)
    more = devices_that_fit(job, limits, constants)
    instead = f"--devices {more}" if more else None
    allowed = f"a plan within {_gb(capacity)} a device; " + "; ".join(tried)
    return PlanError("model", given, allowed.rstrip("; "), instead)


def _offloading(job: PlanningJob, kept: Prediction) -> list[str]:
    """A sentence for each step of moving states off the device."""
    capacity = job.cluster.capacity_bytes
    room = job.cluster.tier("host").capacity_per_device_bytes
    disk = job.cluster.tier("disk").capacity_per_device_bytes if job.cluster.has_tier("disk") else 0.0
    states = kept.memory
    moved = (
        ("optimizer states in host memory", states["optimizer"]),
        ("gradients there too", states["gradients"]),
        ("parameters there too", states["parameters"]),
    )
    device, away = kept.peak_bytes, 0.0
    recompute = kept.strategy.recompute
    how = f"with {recompute} recomputation" if recompute != "none" else "with all activations kept"
    said = []
    for words, num_bytes in moved:
        device, away = device - num_bytes, away + num_bytes
        need = f"{how} and {words}: {_gb(device)} a device"
        if device > capacity:
            said.append(f"{need}, still {_gb(device - capacity)} too much")
            continue
        if away <= room:
            said.append(f"{need} fits ({_gb(away)} in host memory for each)")
            return said
        need += f" would fit, but {_gb(away)} of host memory for each device is {_gb(away - room)} too much"
        if disk and away <= room + disk:
            said.append(f"{need}; the rest would have to lie on disk ({_gb(disk)} for each)")
            return said
        said.append(need)
    return said


def devices_that_fit(job: PlanningJob, limits: Limits, constants: Constants) -> int | None:
    """The smallest doubling of the devices on which the model fits; None if none was found."""
    devices = job.devices
    for _ in range(MOST_DOUBLINGS):
        devices *= 2
        try:
            cluster = job.cluster.resized(devices)
        except ClusterError:
            continue
        batch = max(job.global_batch, default_batch(job.seq, devices))
        larger = replace(job, cluster=cluster, global_batch=batch)
        for offload in (0.0, 1.0 if cluster.has_tier("host") and not limits.runnable else 0.0):
            found = smallest(larger, limits, offload, constants)
            if found is None or found.peak_bytes > cluster.capacity_bytes:
                continue
            if _host_fits(larger, found.host_bytes):
                return devices
    return None


def _host_fits(job: PlanningJob, num_bytes: float) -> bool:
    if not num_bytes:
        return True
    return num_bytes <= job.cluster.tier("host").capacity_per_device_bytes


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
