"""From a pipeline schedule and the price of its actions to tasks: the whole step of one replica.

An action (one microbatch at one stage) is a list of parts: computation and the communication inside it.
What a stage hands to another rank's stage is a message, a task of its own on the sender. Which rank stands
for which devices is the caller's business: of all ranks that do the same, one is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hyperparallel.mpmd import Action, Message, Schedule
from hyperparallel.mpmd.action import halved_backwards, needs_of, num_stages
from hyperparallel.mpmd.message import messages_of
from hyperparallel.simulate.task import NO_DEMAND, Task


class TaskPart(NamedTuple):
    """A part of an action, or a message.

    after: positions of parts of the same action that must end before; None: the part before. Parts
    without any wait for what the action waits for. The other fields are those of `Task`.
    """

    name: str
    work: float
    stream: str = "compute"
    kind: str = "compute"
    after: tuple[int, ...] | None = None
    demand: Mapping[str, float] = NO_DEMAND
    units: float = 0.0
    alloc_bytes: float = 0.0
    free_bytes: float = 0.0


class TaskParts(NamedTuple):
    """What an action is made of; output: the position of the part that makes what is handed on."""

    parts: Sequence[TaskPart]
    output: int = -1


def pipeline_tasks(
    schedule: Schedule,
    work: Callable[[Action], TaskParts],
    message: Callable[[Message], TaskPart],
    finish: Callable[[int], Sequence[TaskPart]] = lambda rank: (),
) -> list[Task]:
    """The tasks of a step: every rank's actions in order, messages behind what makes them, then `finish`.

    finish: what a rank does when all its actions are done (reduce gradients, update).

    >>> from hyperparallel.mpmd import schedule
    >>> one, send = TaskParts([TaskPart("", 1.0)]), TaskPart("", 0.5, "comm")
    >>> step = pipeline_tasks(schedule("gpipe", 2, 1), lambda action: one, lambda message: send)
    >>> [task.name for task in step]
    ['F0.0', 'F0.0 to F1.0', 'B0.0', 'F1.0', 'B1.0', 'B1.0 to B0.0']
    """
    needed = messages_of(schedule)
    sent = {one.source: one for one in needed.values()}
    stages = num_stages(schedule)
    halved = halved_backwards(schedule)
    made = {action: work(action) for actions in schedule for action in actions}
    first: dict[Action, int] = {}
    last = [finish(rank) for rank in range(len(schedule))]
    count = 0
    for rank, actions in enumerate(schedule):
        for action in actions:
            first[action] = count
            # Positions are known before tasks are made: needs point forward to tasks of later ranks.
            count += len(made[action].parts) + (action in sent)
        count += len(last[rank])

    def made_at(action: Action) -> int:
        parts, output = made[action]
        return first[action] + (output if output >= 0 else len(parts) + output)

    def arrives_at(need: Action, action: Action) -> int:
        return first[need] + len(made[need].parts) if action in needed and need in sent else made_at(need)

    tasks: list[Task] = []
    for rank, actions in enumerate(schedule):
        for action in actions:
            needs = [arrives_at(need, action) for need in needs_of(action, stages, halved)]
            _add(tasks, made[action].parts, rank, needs, str(action))
            if action in sent:
                one = sent[action]
                _add(tasks, [message(one)], rank, [made_at(action)], f"{one.source} to {one.target}")
        if last[rank]:
            begin = first[actions[0]] if actions else len(tasks)
            # The last task of each stream of this rank: behind them all of it is done.
            ends = {tasks[i].stream: i for i in range(begin, len(tasks))}
            _add(tasks, last[rank], rank, list(ends.values()), "")
    return tasks


def _add(tasks: list[Task], parts: Sequence[TaskPart], rank: int, needs: Sequence[int], label: str) -> None:
    """Put parts behind the tasks there are; needs: what the first of them waits for."""
    start = len(tasks)
    for i, part in enumerate(parts):
        name = f"{label} {part.name}" if label and part.name else label or part.name
        if part.after is None:
            before: Sequence[int] = (start + i - 1,) if i else needs
        else:
            before = [start + j for j in part.after] if part.after else needs
        tasks.append(
            Task(name, rank, part.stream, part.work, before, part.kind, part.demand, part.units,
                 part.alloc_bytes, part.free_bytes)
        )  # fmt: skip
