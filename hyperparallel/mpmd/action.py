"""The atoms of a pipeline schedule, and what must be done before each.

A model is cut in stages 0, 1, ...; a rank holds one or several of them (virtual stages, chunks). A
microbatch goes forward through all stages and backward through them in reverse. The backward of a stage
is one action (B), or two where the schedule separates the gradient of the input (I), for which the stage
before waits, from that of the weights (W), for which nobody does (Qi et al. 2024, "Zero Bubble Pipeline
Parallelism"). A schedule may split some of its backwards and leave others whole.

Leaves out seconds and bytes: those belong to who prices a schedule.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, NamedTuple

from hyperparallel.errors import PlanError

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One microbatch at one stage: F forward, B backward, I its input half, W its weight half.

    >>> print(Action("F", 2, 7))
    F2.7
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]
"""Per pipeline rank, its actions in order."""


def num_stages(schedule: Schedule) -> int:
    """Stages over all ranks, virtual ones counted."""
    return 1 + max((action.stage for actions in schedule for action in actions), default=-1)


def homes(schedule: Schedule) -> tuple[int, ...]:
    """The rank of every stage; `PlanError` for a stage on several ranks or on none.

    >>> homes(((Action("F", 0, 0), Action("F", 3, 0)), (Action("F", 1, 0), Action("F", 2, 0))))
    (0, 1, 1, 0)
    """
    found: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            other = found.setdefault(action.stage, rank)
            if other != rank:
                given = f"stage {action.stage} on ranks {other} and {rank}"
                raise PlanError("schedule", given, "one rank for each stage")
    missing = [stage for stage in range(num_stages(schedule)) if stage not in found]
    if missing:
        raise PlanError("schedule", f"no action of stage {missing[0]}", "every stage on some rank")
    return tuple(found[stage] for stage in range(len(found)))


Halved = Container[tuple[int, int]]
"""The (stage, microbatch) whose backward is in two halves."""


def halved_backwards(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Those of a schedule, which may split some backwards and not others.

    >>> sorted(halved_backwards(((Action("I", 0, 1), Action("B", 0, 0), Action("W", 0, 1)),)))
    [(0, 1)]
    """
    return frozenset((a.stage, a.microbatch) for actions in schedule for a in actions if a.kind == "I")


def needs_of(action: Action, stages: int, halved: Halved = ()) -> tuple[Action, ...]:
    """What must be done before an action, whatever the order.

    >>> [str(a) for a in needs_of(Action("B", 0, 5), 2)]
    ['F0.5', 'B1.5']
    >>> [str(a) for a in needs_of(Action("B", 0, 5), 2, halved={(1, 5)})]
    ['F0.5', 'I1.5']
    """
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    later: tuple[Action, ...] = ()
    if stage < stages - 1:
        # The gradient of the input is all that the stage before waits for: of halves, the first.
        later = (Action("I" if (stage + 1, microbatch) in halved else "B", stage + 1, microbatch),)
    return (Action("F", stage, microbatch), *later)
