"""How long a schedule takes and how much of it is idle: by following its order, and in closed form.

`timed` follows every rank's list: an action begins when its rank is free and what it needs is done. In the
closed forms p ranks do m microbatches in v chunks a rank, and F, I, W are the seconds of one microbatch on
one rank (B = I + W). Idle seconds of a step that ends for all at once:

    gpipe, 1f1b     (p - 1)(F + I + W)
    interleaved     (p - 1)(F + I + W) / v
    zb-h1           (p - 1) max(F, I, F + I - W)
    zb-h2           (p - 1) max(F, F + I - 2W)
    zb-v            (p - 1) max(F, I, 2(I - W)) / 2

If each rank may begin its next step while others finish (no norm or check over all of them), zero-bubble
schedules lose only (p - 1) times F + I - W, F + I - 2W and I - W, where those are above 0. The share is
idle / (idle + m(F + I + W)). gpipe, 1f1b, interleaved: Narayanan et al. 2021; zb: Qi et al. 2024, where W
is no longer than F and I, and m at least p (zb-h1) or 2p. Arguments may be numpy arrays. Messages take no
time here; the event simulation (`plan/simulate`) prices them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hyperparallel.errors import PlanError, nearest
from hyperparallel.mpmd.action import Action, Schedule, homes, needs_of
from hyperparallel.mpmd.schedule import SCHEDULES


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
    """Follow a schedule's order; `PlanError` names the ranks that wait for ever.

    message_seconds: added where what an action needs is done on another rank.

    >>> from hyperparallel.mpmd.schedule import schedule
    >>> timed(schedule("1f1b", 2, 2), lambda action: 2.0 if action.kind == "B" else 1.0).seconds
    9.0
    """
    home, splits = homes(schedule), any(a.kind == "I" for actions in schedule for a in actions)
    begin: dict[Action, float] = {}
    end: dict[Action, float] = {}
    clocks, place = [0.0] * len(schedule), [0] * len(schedule)
    waiting: dict[Action, int] = {}
    todo = list(range(len(schedule)))
    while todo:
        rank = todo.pop()
        actions = schedule[rank]
        while place[rank] < len(actions):
            action = actions[place[rank]]
            ready, missing = clocks[rank], None
            for need in needs_of(action, len(home), splits):
                if need not in end:
                    missing = need
                    break
                ready = max(ready, end[need] + (message_seconds if home[need.stage] != rank else 0.0))
            if missing is not None:
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
        raise PlanError("schedule", f"ranks that wait for ever: {stuck}", "an order that can be followed")
    return Times(begin, end, max(clocks))


def bubble_share(
    name: str,
    stages: Any,
    microbatches: Any,
    virtual: Any = 1,
    *,
    forward: Any = 1.0,
    input_grad: Any = 1.0,
    weight_grad: Any = 1.0,
    together: bool = True,
) -> Any:
    """The idle share of a named schedule in closed form; seconds are a microbatch's on one rank.

    together: whether a step ends for all ranks at once. Raises `PlanError` for an unknown name.

    >>> bubble_share("1f1b", 4, 12)
    0.2
    >>> bubble_share("interleaved", 4, 12, 3) == 3 / (12 * 3 + 3)
    True
    >>> bubble_share("zb-h2", 4, 12, together=False)
    0.0
    """
    first, second, third = forward, input_grad, weight_grad
    work = first + second + third
    if name in ("gpipe", "1f1b"):
        lost = work
    elif name == "interleaved":
        lost = work / virtual
    elif name == "zb-h1":
        lost = _largest(first, second, first + second - third) if together else first + second - third
    elif name == "zb-h2":
        lost = _largest(first if together else 0.0, first + second - 2.0 * third)
    elif name == "zb-v":
        lost = _largest(first, second, 2.0 * (second - third)) / 2.0 if together else second - third
    else:
        raise PlanError("schedule", name, f"one of {', '.join(SCHEDULES)}", nearest(name, SCHEDULES, 1))
    idle = (stages - 1) * _largest(0.0, lost)
    return idle / (idle + microbatches * work)


def _largest(*values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = found + (value - found) * (value > found)
    return found


def most_in_flight(name: str, stages: Any, microbatches: Any, virtual: Any = 1, rank: Any = 0) -> Any:
    """Forwards that a rank holds at most, in closed form, as a number of chunks (1/virtual of its layers).

    >>> most_in_flight("1f1b", 4, 12), most_in_flight("interleaved", 4, 12, 2)
    (4, 11)
    """
    if name == "gpipe":
        return microbatches
    if name == "1f1b":
        return _smaller(microbatches, stages - rank)
    if name == "interleaved":
        twice = 1 + (virtual > 1)  # one chunk is 1f1b
        ahead = twice * (stages - 1 - rank) + (virtual - 1) * stages + 1
        return _smaller(microbatches * virtual, ahead)
    if name == "zb-h1":
        return _smaller(microbatches, stages)
    if name == "zb-h2":
        return _smaller(microbatches, 2 * stages - 1)
    if name == "zb-v":
        return _smaller(2 * microbatches, 2 * stages)
    raise PlanError("schedule", name, f"one of {', '.join(SCHEDULES)}", nearest(name, SCHEDULES, 1))


def _smaller(a: Any, b: Any) -> Any:
    return a + (b - a) * (b < a)
