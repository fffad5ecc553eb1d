"""From a pipeline schedule and the price of its actions to tasks: the whole step of one replica.

An action (one microbatch at one stage) is a list of pieces: computation and the communication inside it.
What a stage hands to another rank's stage is a message, a task of its own on the sender. Which rank stands
for which devices is the caller's business: of all ranks that do the same, one is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hyperparallel.mpmd import Action, Message, Schedule
from hyperparallel.mpmd.action import halved_backwards, needs_of, num_stages
from hyperparallel.mpmd.message import messages_of
from hyperparallel.simulate.task import NOTHING, Task


class TaskPart(NamedTuple):
    """A part of an action, or a message.

    after: positions of pieces of the same action that must end before; None: the piece before. Pieces
    without any wait for what the action waits for. The other fields are those of `Task`.
    """

    name: str
    work: float
    stream: str = "compute"
    kind: str = "compute"
    after: tuple[int, ...] | None = None
    demand: Mapping[str, float] = NOTHING
    units: float = 0.0
    alloc_bytes: float = 0.0
    free_bytes: float = 0.0


class TaskParts(NamedTuple):
    """What an action is made of; output: the position of the piece that makes what is handed on."""

    pieces: Sequence[TaskPart]
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
            count += len(made[action].pieces) + (action in sent)
        count += len(last[rank])

    def made_at(action: Action) -> int:
        pieces, output = made[action]
        return first[action] + (output if output >= 0 else len(pieces) + output)

    def arrives_at(need: Action, action: Action) -> int:
        return first[need] + len(made[need].pieces) if action in needed and need in sent else made_at(need)

    tasks: list[Task] = []
    for rank, actions in enumerate(schedule):
        for action in actions:
            needs = [arrives_at(need, action) for need in needs_of(action, stages, halved)]
            _add(tasks, made[action].pieces, rank, needs, str(action))
            if action in sent:
                one = sent[action]
                _add(tasks, [message(one)], rank, [made_at(action)], f"{one.source} to {one.target}")
        if last[rank]:
            begin = first[actions[0]] if actions else len(tasks)
            ends = {tasks[i].stream: i for i in range(begin, len(tasks))}
            _add(tasks, last[rank], rank, list(ends.values()), "")
    return tasks


def _add(tasks: list[Task], pieces: Sequence[TaskPart], rank: int, needs: Sequence[int], label: str) -> None:
    """Put pieces behind the tasks there are; needs: what the first of them waits for."""
    start = len(tasks)
    for i, piece in enumerate(pieces):
        name = f"{label} {piece.name}" if label and piece.name else label or piece.name
        if piece.after is None:
            before: Sequence[int] = (start + i - 1,) if i else needs
        else:
            before = [start + j for j in piece.after] if piece.after else needs
        tasks.append(
            Task(name, rank, piece.stream, piece.work, before, piece.kind, piece.demand, piece.units,
                 piece.alloc_bytes, piece.free_bytes)
        )  # fmt: skip
