"""Whether a schedule can be run, and what it keeps in memory.

A schedule is right if every stage has one rank, every microbatch goes once forward and once backward
through every stage (in one piece or in halves, alike everywhere), and no rank waits for ever when each
follows its own list, messages included. Its memory is the largest sum of what lies between a forward and
the end of its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hyperparallel.errors import PlanError
from hyperparallel.mpmd.action import KINDS, Action, Schedule, homes, num_stages
from hyperparallel.mpmd.bubble import timed


def check_schedule(schedule: Schedule, most: Sequence[int] | int | None = None) -> None:
    """Raise `PlanError` for a schedule that cannot be run; it says which action is wrong.

    most: forwards that each rank (or every one) may hold at a time.

    >>> check_schedule(((Action("F", 0, 0), Action("B", 0, 0)), (Action("B", 1, 0), Action("F", 1, 0))))
    Traceback (most recent call last):
    hyperparallel.errors.PlanError: schedule: got 'ranks that wait for ever: rank 1 at B1.0 for F1.0,
    rank 0 at B0.0 for B1.0'; allowed: an order that can be followed
    """
    homes(schedule)
    counts = Counter(action for actions in schedule for action in actions)
    microbatches = {action.microbatch for action in counts}
    splits = any(action.kind == "I" for action in counts)
    wanted = {
        Action(kind, stage, m)
        for kind in KINDS
        if kind == "F" or (kind in ("I", "W") if splits else kind == "B")
        for stage in range(num_stages(schedule))
        for m in microbatches
    }
    for action in sorted(wanted | counts.keys()):
        if action not in wanted:
            raise PlanError("schedule", str(action), "F and B, or F, I and W, for all actions alike")
        if counts[action] != 1:
            raise PlanError("schedule", f"{action} {counts[action]} times", "every action once")
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

    >>> from hyperparallel.mpmd.schedule import schedule
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
            elif action.kind in ("B", "W"):
                held -= kept
        peaks.append(peak)
    return tuple(peaks)
