"""Whether a schedule can be run, and what it keeps in memory.

A schedule is right if every stage has one rank, every microbatch goes once forward and once backward
through every stage (each backward in one piece or in halves), and no order of lists makes ranks deadlock,
messages included. Its memory is the largest sum of what lies between a forward and
the end of its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hyperparallel.errors import PlanError
from hyperparallel.mpmd.action import Action, Schedule, halved_backwards, homes, num_stages
from hyperparallel.mpmd.bubble import timed


def check_schedule(schedule: Schedule, most: Sequence[int] | int | None = None) -> None:
    """Raise `PlanError` for a schedule that cannot be run; it says which action is wrong.

    most: forwards that each rank (or every one) may hold at a time.

    >>> check_schedule(((Action("F", 0, 0), Action("B", 0, 0)), (Action("B", 1, 0), Action("F", 1, 0))))
    Traceback (most recent call last):
    hyperparallel.errors.PlanError: schedule: got 'a deadlock: rank 1 at B1.0 for F1.0,
    rank 0 at B0.0 for B1.0'; allowed: an order that can be followed
    """
    homes(schedule)
    counts = Counter(action for actions in schedule for action in actions)
    microbatches = {action.microbatch for action in counts}
    halved = halved_backwards(schedule)
    wanted = {
        Action(kind, stage, m)
        for stage in range(num_stages(schedule))
        for m in microbatches
        for kind in (("F", "I", "W") if (stage, m) in halved else ("F", "B"))
    }
    for action in sorted(wanted | counts.keys()):
        if action not in wanted:
            raise PlanError("schedule", str(action), "for each stage and microbatch F and B, or F, I and W")
        if counts[action] != 1:
            raise PlanError("schedule", f"{action} {counts[action]} times", "every action once")
    # Whether it deadlocks does not depend on how long actions take.
    timed(schedule, lambda action: 1.0)
    held = in_flight(schedule)
    limits = [most] * len(held) if isinstance(most, int) else most
    for rank, (peak, limit) in enumerate(zip(held, limits or held, strict=True)):
        if peak > limit:
            given = f"rank {rank} holds {peak} forwards"
            raise PlanError("schedule", given, f"at most {limit} at a time")


def in_flight(
    schedule: Schedule, weight: Callable[[int], float] | None = None
) -> tuple[float, ...] | tuple[int, ...]:
    """Per rank the most that lies between forwards and the ends of their backwards.

    weight: what one microbatch of a stage keeps (bytes); by default 1, so that the result counts.

    >>> from hyperparallel.mpmd.schedules.table import schedule
    >>> in_flight(schedule("1f1b", 3, 8))
    (3, 2, 1)
    """
    peaks = []
    for actions in schedule:
        held = peak = 0 if weight is None else 0.0
        for action in actions:
            kept = 1 if weight is None else weight(action.stage)
            if action.kind == "F":
                held += kept
                peak = max(peak, held)
            # Not I: the weights' gradient still reads what the forward saved.
            elif action.kind in ("B", "W"):
                held -= kept
        peaks.append(peak)
    return tuple(peaks)
