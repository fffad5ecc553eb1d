"""What the engine runs: tasks with work, needs and what they take while they run.

A task is the smallest thing with a duration: an op or several, a phase of a collective, a copy. Prices
come from elsewhere; here are seconds alone and shares of what others may want too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hyperparallel.errors import PlanError

NO_DEMAND: Mapping[str, float] = {}


class Task(NamedTuple):
    """One task.

    rank, stream: where; a stream does its tasks in list order, one at a time. A stream whose name begins
        with "compute" computes, others communicate or copy.
    work: seconds when nothing else runs. needs: positions of tasks that must end before.
    kind: what it is grouped under; a "wait" is shown from when its stream came to it.
    demand: link -> share of the link's capacity that it takes when alone (0 to 1).
    units: share of its rank's compute units that a communication holds while it runs.
    alloc_bytes: taken when it begins; free_bytes: given back when it ends.
    """

    name: str
    rank: int
    stream: str
    work: float
    needs: Sequence[int] = ()
    kind: str = "compute"
    demand: Mapping[str, float] = NO_DEMAND
    units: float = 0.0
    alloc_bytes: float = 0.0
    free_bytes: float = 0.0


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise `PlanError` for a task with impossible numbers, or that needs what is not there."""
    for i, task in enumerate(tasks):
        if not (task.work >= 0.0 and math.isfinite(task.work)):
            raise PlanError(f"work of {task.name}", task.work, "seconds, 0 or more")
        if not 0.0 <= task.units < 1.0:
            raise PlanError(f"units of {task.name}", task.units, "a share from 0 to below 1")
        for link, share in task.demand.items():
            if not 0.0 < share <= 1.0:
                raise PlanError(f"demand of {task.name} on {link}", share, "a share above 0, up to 1")
        for need in task.needs:
            if not 0 <= need < len(tasks) or need == i:
                raise PlanError(f"needs of {task.name}", need, f"positions of the other {len(tasks)} tasks")
