"""Small jobs for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hyperparallel.cluster.presets import preset
from hyperparallel.planner.job import PlanningJob
from hyperparallel.workload.presets import gpt, load_model


def job(
    model: str = "qwen3-0.6b",
    cluster: str = "h100",
    devices: int = 8,
    seq: int = 2048,
    batch: int = 32,
    **more: Any,
) -> PlanningJob:
    """A job by names."""
    return PlanningJob(load_model(model), preset(cluster, devices), seq, batch, **more)


def tight(layers: int = 10, capacity: float = 24e9, devices: int = 8, batch: int = 32) -> PlanningJob:
    """A GPT on H100s of which only so much memory is there."""
    cluster = preset("h100", devices)
    own = replace(cluster.memory[0], capacity_bytes=capacity)
    small = replace(cluster, memory=(own, *cluster.memory[1:]))
    return PlanningJob(gpt(2048, layers, 16, seq=2048), small, 2048, batch)
