"""How long a schedule takes and how much of it is idle: by following its order, and in closed form.

`timed` follows every rank's list: an action begins when its rank is free and what it needs is done. Closed
forms stand in the schedules' records. With `idle` the seconds that a step takes beyond the m microbatches of
its fullest rank, and F, I, W those of one microbatch there, the share is idle / (idle + m(F + I + W)).
Arguments may be numpy arrays. Messages take no time here; the event simulation (`simulate/pipeline.py`)
prices them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hyperparallel.errors import PlanError
from hyperparallel.mpmd.action import Action, Schedule, halved_backwards, homes, needs_of
from hyperparallel.mpmd.schedules.record import PipelineSchedule, RankSeconds, larger
from hyperparallel.mpmd.schedules.table import schedule_named


class Times(NamedTuple):
    """When actions begin and end, and the whole: `seconds` until the last rank is done."""

    begin: dict[Action, float]
    end: dict[Action, float]
    seconds: float

    def idle_share(self, ranks: int) -> float:
        """The share of all ranks' time in which they do nothing."""
        busy = sum(self.end.values()) - sum(self.begin.values())
        return 1.0 - busy / (ranks * self.seconds)


def timed(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    message_seconds: float = 0.0,
) -> Times:
    """Follow a schedule's order; `PlanError` names the ranks that deadlock.

    message_seconds: added where what an action needs is done on another rank.

    >>> from hyperparallel.mpmd.schedules.table import schedule
    >>> timed(schedule("1f1b", 2, 2), lambda action: 2.0 if action.kind == "B" else 1.0).seconds
    9.0
    """
    home, halved = homes(schedule), halved_backwards(schedule)
    begin: dict[Action, float] = {}
    end: dict[Action, float] = {}
    clocks, place = [0.0] * len(schedule), [0] * len(schedule)
    waiting: dict[Action, int] = {}
    # Each rank runs on until it lacks something; who makes that wakes it: every action is looked at once or
    # twice.
    todo = list(range(len(schedule)))
    while todo:
        rank = todo.pop()
        actions = schedule[rank]
        while place[rank] < len(actions):
            action = actions[place[rank]]
            ready, missing = clocks[rank], None
            for need in needs_of(action, len(home), halved):
                if need not in end:
                    missing = need
                    break
                ready = max(ready, end[need] + (message_seconds if home[need.stage] != rank else 0.0))
            if missing is not None:
                # One entry is enough: beyond its own rank an action has one reader, the next stage's F or
                # the previous stage's backward.
                waiting[missing] = rank
                break
            begin[action] = ready
            clocks[rank] = end[action] = ready + seconds(action)
            place[rank] += 1
            if action in waiting:
                todo.append(waiting.pop(action))
    if waiting:
        stuck = ", ".join(
            f"rank {rank} at {schedule[rank][place[rank]]} for {need}" for need, rank in waiting.items()
        )
        raise PlanError("schedule", f"a deadlock: {stuck}", "an order that can be followed")
    return Times(begin, end, max(clocks))


def bubble_share(
    name: str,
    stages: Any,
    microbatches: Any,
    virtual: Any = None,
    *,
    forward: Any = 1.0,
    input_grad: Any = 1.0,
    weight_grad: Any = 1.0,
    together: bool = True,
) -> Any:
    """The idle share of a named schedule in closed form; seconds are a microbatch's on one rank.

    together: whether a step ends for all ranks at once. Holds for steps that the record `serves`. Raises
    `PlanError` for an unknown name, and for chunks that the schedule cannot have.

    >>> bubble_share("1f1b", 4, 12)
    0.2
    >>> bubble_share("1f1b", 4, 12, 3) == 3 / (12 * 3 + 3)
    True
    >>> bubble_share("zb-h2", 4, 12, together=False)
    0.0
    """
    record = schedule_named(name)
    seconds = RankSeconds(forward, input_grad, weight_grad)
    lost = record.idle if together else record.idle_alone
    # Above 0: more work on a rank than the others wait for leaves nothing idle, but gives no time back.
    idle = larger(0.0, lost(stages, microbatches, _chunks(record, virtual), seconds))
    return idle / (idle + microbatches * seconds.work)


def most_in_flight(name: str, stages: Any, microbatches: Any, virtual: Any = None, rank: Any = 0) -> Any:
    """Forwards that a rank holds at most, in closed form, as a number of chunks (1/virtual of its layers).

    >>> most_in_flight("1f1b", 4, 12), most_in_flight("1f1b", 4, 12, 2)
    (4, 11)
    """
    record = schedule_named(name)
    return record.held(stages, microbatches, _chunks(record, virtual), rank)


def _chunks(record: PipelineSchedule, virtual: Any) -> Any:
    """Chunks a rank, by default as few as the schedule can have."""
    chunks = record.usual_chunks[0] if virtual is None else virtual
    if not np.all(record.chunks(chunks)):
        allowed = f"{record.usual_chunks[0]} for {record.name}"
        raise PlanError("virtual", chunks, allowed, f"virtual: {record.usual_chunks[0]}")
    return chunks
