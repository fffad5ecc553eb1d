"""What ranks send each other: a schedule with its sends and receives written out.

An activation goes from a stage to the next, a gradient back, where the two stages have different ranks.
Sends follow the action that makes them. A pair of ranks has one channel, and messages on it are matched in
order, as in process groups: a receive is posted as late as its first use allows, but never behind one
whose message was sent later. Sends do not block (a buffer holds them), so posting in order cannot lock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hyperparallel.mpmd.action import Action, Schedule, halved_backwards, homes, needs_of


@dataclass(frozen=True)
class Message:
    """What `source` makes for `target` (actions) on another rank."""

    source: Action
    target: Action
    from_rank: int
    to_rank: int

    @property
    def kind(self) -> str:
        """What moves: "activation" or "gradient"."""
        return "activation" if self.target.kind == "F" else "gradient"


@dataclass(frozen=True)
class Send:
    """Start sending a message."""

    message: Message


@dataclass(frozen=True)
class Receive:
    """Post the receive of a message; its target waits for it."""

    message: Message


ScheduleEntry = Action | Send | Receive


def messages_of(schedule: Schedule) -> dict[Action, Message]:
    """Target action -> the message that it needs from another rank."""
    home, halved = homes(schedule), halved_backwards(schedule)
    found = {}
    for actions in schedule:
        for action in actions:
            for need in needs_of(action, len(home), halved):
                source, target = home[need.stage], home[action.stage]
                if source != target:
                    found[action] = Message(need, action, source, target)
    return found


def lowered(schedule: Schedule) -> tuple[tuple[ScheduleEntry, ...], ...]:
    """Every rank's actions with its sends and receives between them.

    >>> from hyperparallel.mpmd.schedules.table import schedule
    >>> [type(entry).__name__ for entry in lowered(schedule("gpipe", 2, 1))[0]]
    ['Action', 'Send', 'Receive', 'Action']
    """
    needed = messages_of(schedule)
    # An action makes at most one message: a stage has one stage behind it and one before.
    made = {message.source: message for message in needed.values()}
    place = {a: i for actions in schedule for i, a in enumerate(actions)}
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for actions in schedule:
        for action in actions:
            if action in made:
                channels[made[action].from_rank, made[action].to_rank].append(made[action])
    before: dict[Action, list[Receive]] = defaultdict(list)
    for (_, rank), sent in channels.items():
        # Walk a channel from its last message: a receive may not be posted behind one whose message was sent
        # later, or the two would be given each other's tensors.
        first = len(schedule[rank])
        posts: list[tuple[int, Receive]] = []
        for message in reversed(sent):
            first = min(first, place[message.target])
            posts.append((first, Receive(message)))
        for position, receive in reversed(posts):
            before[schedule[rank][position]].append(receive)
    result = []
    for actions in schedule:
        entries: list[ScheduleEntry] = []
        for action in actions:
            entries += [*before.get(action, ()), action]
            if action in made:
                entries.append(Send(made[action]))
        result.append(tuple(entries))
    return tuple(result)
