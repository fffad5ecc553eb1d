"""One published run: what was run on what, and how long a step took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.memory import memory_of
from hyperparallel.planner.cost.price import step_seconds
from hyperparallel.planner.cost.rows import Rows
from hyperparallel.planner.strategy import RECOMPUTE, Candidates, Strategy
from hyperparallel.workload.model import Model

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A measured step. source: the publication or table that is calibrated together. group: runs that a
    planner would choose among (same model and devices), "" for none. whole_step: False where forward and
    backward of the layers alone were timed. choices: other strategies that the row may have run, where it
    leaves out a part of it and its authors say that they tuned it; the fastest that fits is taken.
    memory_bytes: measured peak, 0 for none. recompute_unknown: the table does not say what is recomputed;
    whether the run fits is then asked of every kind."""

    table: str
    source: str
    name: str
    model: Model
    cluster: Cluster
    seq: int
    batch: int
    strategy: Strategy
    seconds: float
    group: str = ""
    whole_step: bool = True
    choices: tuple[Strategy, ...] = ()
    memory_bytes: float = 0.0
    recompute_unknown: bool = False


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be expressed, and why."""

    table: str
    name: str
    reason: str


@dataclass
class Priced:
    """All cases as rows to price: `owner` is the case of a row, `memory` the bytes it needs, `fits` whether
    there are as many, `reserved` what an allocator reports, `whole` whether the whole step was timed."""

    rows: Rows
    owner: npt.NDArray[np.int64]
    fits: npt.NDArray[np.bool_]
    memory: Array
    reserved: Array
    whole: npt.NDArray[np.bool_]

    def seconds(self, constants: Constants) -> Array:
        """Predicted seconds of each case."""
        step = step_seconds(self.rows, constants)
        seconds = np.where(self.whole, step.seconds, step.compute + step.exposed_tensor)
        result = np.full(self.owner.max() + 1, np.inf)
        np.minimum.at(result, self.owner, np.where(self.fits, seconds, np.inf))
        return result

    def needed(self, case: int) -> float:
        """Bytes on the fullest rank of a case (of its smallest choice)."""
        return float(self.memory[self.owner == case].min())

    def reported(self, case: int) -> float:
        """Bytes that an allocator reports there."""
        return float(self.reserved[self.owner == case].min())


def priced(cases: Sequence[Case]) -> Priced:
    """All cases in order; equal models, clusters and lengths are built together."""
    together: dict[tuple[str, str, int, int], list[tuple[int, Strategy]]] = {}
    for index, case in enumerate(cases):
        key = (repr(case.model), case.cluster.name, case.cluster.num_devices, case.seq)
        for strategy in case.choices or (case.strategy,):
            together.setdefault(key, []).append((index, strategy))
    parts, owner = [], []
    for entries in together.values():
        first = cases[entries[0][0]]
        batch = np.array([float(cases[index].batch) for index, _ in entries])
        candidates = Candidates.of(strategy for _, strategy in entries)
        parts.append(rows_of(first.model, first.cluster, first.seq, batch, candidates))
        owner += [index for index, _ in entries]
    rows = Rows.joined(parts)
    place = np.array(owner)
    capacity = np.array([cases[i].cluster.capacity_bytes for i in owner])
    peaks = memory_of(rows)
    memory = peaks.total
    for index, case in enumerate(cases):
        if case.recompute_unknown:
            memory[place == index] = _least_memory(case, float(memory[place == index][0]))
    only = np.array([not cases[i].choices for i in owner])
    fits = only | (memory <= capacity)
    found = np.zeros(len(cases), bool)
    np.logical_or.at(found, place, fits)
    fits |= ~found[place]  # none fits: any may have run
    return Priced(rows, place, fits, memory, peaks.reserved, np.array([cases[i].whole_step for i in owner]))


def _least_memory(case: Case, without: float) -> float:
    """Bytes that the case needs: without recomputation where that fits, else by what needs least."""
    if without <= case.cluster.capacity_bytes:
        return without
    kinds = Candidates.of(replace(case.strategy, recompute=kind) for kind in RECOMPUTE)  # type: ignore[arg-type]
    rows = rows_of(case.model, case.cluster, case.seq, float(case.batch), kinds)
    return float(memory_of(rows).total.min())


def seconds_of(cases: Iterable[Case]) -> Array:
    """What was measured."""
    return np.array([case.seconds for case in cases])
