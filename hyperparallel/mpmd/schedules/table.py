"""The table of named schedules: a new one is a record in a file of this folder and a row here.

p ranks, m microbatches, v chunks a rank; what each loses stands in its file. `docs/extending.md` names the
places that read the table, and `tests/mpmd/schedules/test_table.py` walks them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hyperparallel.errors import PlanError, nearest
from hyperparallel.mpmd.action import Schedule
from hyperparallel.mpmd.schedules.dualpipe_v import DUALPIPE_V
from hyperparallel.mpmd.schedules.record import PipelineSchedule
from hyperparallel.mpmd.schedules.whole_backward import GPIPE, ONE_F_ONE_B
from hyperparallel.mpmd.schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V

SCHEDULES: Mapping[str, PipelineSchedule] = {
    record.name: record for record in (ONE_F_ONE_B, GPIPE, ZB_H1, ZB_H2, ZB_V, DUALPIPE_V)
}
"""By name, the usual one first."""


def schedule_named(name: str) -> PipelineSchedule:
    """The record of a name; `PlanError` for an unknown one.

    >>> schedule_named("zb-h1").words
    "1f1b with the weights' gradients in the bubble"
    """
    if name not in SCHEDULES:
        raise PlanError("schedule", name, f"one of {', '.join(SCHEDULES)}", nearest(name, SCHEDULES, 1))
    return SCHEDULES[name]


def schedule(name: str, stages: int, microbatches: int, virtual: int | None = None) -> Schedule:
    """Every rank's actions under a named schedule.

    stages: pipeline ranks. virtual: chunks a rank, by default as few as the schedule can have. Raises
    `PlanError` for an unknown name, or for sizes that the schedule cannot have.

    >>> " ".join(map(str, schedule("1f1b", 2, 3)[0]))
    'F0.0 F0.1 B0.0 F0.2 B0.1 B0.2'
    """
    record = schedule_named(name)
    chunks = record.usual_chunks[0] if virtual is None else virtual
    for field, given in (("stages", stages), ("microbatches", microbatches), ("virtual", chunks)):
        if given < 1:
            raise PlanError(field, given, "1 or more")
    if not record.chunks(chunks):
        allowed = f"{record.usual_chunks[0]} for {name}"
        raise PlanError("virtual", chunks, allowed, f"virtual: {record.usual_chunks[0]}")
    return record.order(stages, microbatches, chunks)
