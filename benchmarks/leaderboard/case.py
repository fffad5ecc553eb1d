"""One published run: what was run on what, and how long a step took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.plan.cost.build import rows_of
from hyperparallel.plan.cost.rows import Rows
from hyperparallel.plan.strategy import Candidates, Strategy
from hyperparallel.workload.model import Model

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A measured step. source: the publication or table that is calibrated together. group: runs that a
    planner would choose among (same model and devices), "" for none."""

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
    """False: forward and backward of the layers alone were timed."""


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be expressed, and why."""

    table: str
    name: str
    reason: str


def rows_of_cases(cases: Sequence[Case]) -> Rows:
    """All cases as rows to price, in order."""
    together: dict[tuple[str, str, int, int], list[int]] = {}
    models: dict[str, Model] = {}
    for index, case in enumerate(cases):
        key = (repr(case.model), case.cluster.name, case.cluster.num_devices, case.seq)
        models[key[0]] = case.model
        together.setdefault(key, []).append(index)
    parts, order = [], []
    for indexes in together.values():
        first = cases[indexes[0]]
        batch = np.array([float(cases[i].batch) for i in indexes])
        candidates = Candidates.of(cases[i].strategy for i in indexes)
        parts.append(rows_of(first.model, first.cluster, first.seq, batch, candidates))
        order += indexes
    return _sorted(Rows.joined(parts), np.argsort(order))


def _sorted(rows: Rows, order: npt.NDArray[np.int64]) -> Rows:
    """Rows put in another order: `order[i]` is where the new row i stands."""
    place = np.argsort(order)
    rows.segment_row = place[rows.segment_row]
    rows.row = {name: column[order] for name, column in rows.row.items()}
    rows.groups = {name: groups.take(order) for name, groups in rows.groups.items()}
    return rows


def seconds_of(cases: Iterable[Case]) -> Array:
    """What was measured."""
    return np.array([case.seconds for case in cases])
