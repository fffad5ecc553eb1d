"""Strategies of a job as a table of times and memory, with what is cheap to change left open.

Shapes, groups and what is recomputed fix the kernels and messages of a row; chunks a stage, the schedule,
ZeRO-1 or 2 and offload only enter at the end. So a table is built and priced once for all of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hyperparallel.planner.cost.build import rows_of, with_pipeline
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.memory import Memory, memory_of
from hyperparallel.planner.cost.price import SegmentTimes, StepTime, segment_times, step_seconds
from hyperparallel.planner.cost.rows import Rows
from hyperparallel.planner.cost.work import Array
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.strategy import SCHEDULE_NAMES, Candidates, Strategy, runs_beside_others

TIME_PARTS = ("compute", "exposed_tensor", "exposed_experts", "bubble", "exposed_gradients", "optimizer")
MEMORY_PARTS = tuple(f.name for f in fields(Memory) if f.name != "host")


NO_COLUMNS: Mapping[str, Any] = {}


class StrategyTable:
    """Rows of a job, priced when first asked for their time."""

    def __init__(self, job: PlanningJob, candidates: Candidates, constants: Constants) -> None:
        self.job, self.candidates, self.constants = job, candidates, constants
        self.rows: Rows = rows_of(job.model, job.cluster, job.seq, job.global_batch, candidates)
        self._times: dict[bytes, SegmentTimes] = {}

    def times(self, columns: Mapping[str, Any] = NO_COLUMNS) -> SegmentTimes:
        """Of every segment, with other `virtual` or `schedule`.

        Of those a segment's time depends only on whether they hide one microbatch's messages beside another,
        so that all that agree on this share one pricing.
        """
        rows = self._with(columns)
        r = rows.row
        # Bytes, since arrays do not hash.
        beside = runs_beside_others(r["pp"], r["virtual"], r["schedule"]).tobytes()
        if beside not in self._times:
            self._times[beside] = segment_times(rows, self.constants)
        return self._times[beside]

    def _with(self, columns: Mapping[str, Any]) -> Rows:
        if not columns:
            return self.rows
        length = self.rows.length
        given = {name: np.broadcast_to(np.asarray(v, float), (length,)) for name, v in columns.items()}
        row = {**self.rows.row, **given}
        pipeline = (row["virtual"], row["schedule"])
        return replace(self.rows, row={**with_pipeline(self.rows.row, *pipeline), **given})

    def step(self, **columns: Any) -> StepTime:
        """Times of all rows, with other `virtual`, `schedule` (its position) or `offload`."""
        return step_seconds(self._with(columns), self.constants, self.times(columns))

    def memory(self, **columns: Any) -> Memory:
        """Memory of all rows, with other `virtual`, `schedule`, `zero` or `offload`."""
        return memory_of(self._with(columns))

    def fits(self, memory: Memory) -> Array:
        """Which rows a device and its share of the host can hold."""
        return fits(self.job, memory)


def fits(job: PlanningJob, memory: Memory) -> Array:
    """Which rows a device and its share of the host can hold."""
    good: Array = memory.total <= job.cluster.capacity_bytes
    if job.cluster.has_tier("host"):
        good = good & (memory.host <= job.cluster.tier("host").capacity_per_device_bytes)
    return good


@dataclass(frozen=True)
class Prediction:
    """What is expected of a strategy: seconds of a step, their parts, and bytes of the fullest rank.

    seconds: in closed form, or simulated (`PlannedStrategy.expected`); parts: of it (`TIME_PARTS`, and
    "exposed_host" where activations are offloaded), adding up. communication: seconds of all messages, hidden
    or not. memory: parts in bytes (`MEMORY_PARTS`). host_bytes: kept in host memory, each device.
    """

    strategy: Strategy
    seconds: float
    parts: Mapping[str, float]
    communication: float
    memory: Mapping[str, float]
    host_bytes: float

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def exposed(self) -> float:
        """Seconds of communication and copies that nothing hides."""
        return sum(value for name, value in self.parts.items() if name.startswith("exposed"))

    @property
    def bubble_share(self) -> float:
        """Of the step: pipeline stages that wait, for the first microbatch or for a longer stage."""
        return self.parts["bubble"] / self.seconds

    @property
    def exposed_share(self) -> float:
        return self.exposed / self.seconds


def prediction(strategy: Strategy, step: StepTime, memory: Memory, index: int) -> Prediction:
    """One row of a table."""
    parts = {name: float(getattr(step, name)[index]) for name in TIME_PARTS}
    held = {name: float(getattr(memory, name)[index]) for name in MEMORY_PARTS}
    moved, host = float(step.communication[index]), float(memory.host[index])
    return Prediction(strategy, float(step.seconds[index]), parts, moved, held, host)


def predict(job: PlanningJob, strategies: list[Strategy], constants: Constants) -> list[Prediction]:
    """Every strategy as it is, in order."""
    if not strategies:
        return []
    table = StrategyTable(job, Candidates.of(strategies), constants)
    step, memory = table.step(), table.memory()
    return [prediction(strategy, step, memory, i) for i, strategy in enumerate(strategies)]


def schedule_code(name: str) -> float:
    """The position of a schedule in `SCHEDULE_NAMES`."""
    return float(SCHEDULE_NAMES.index(name))
