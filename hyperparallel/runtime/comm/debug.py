"""Debug mode: before each collective, check that all members of the group are making the same one.

`HYPERPARALLEL_DEBUG=collectives` puts this transport on top of the real one. Before each call the members
meet (`meeting.py`): each says what it is about to do (collective, dtype, shape, sizes, line of the caller),
reads what the others say, and raises on all members when they do not fit, within the time that the slowest
takes to make its own call. One that does not come is named at the deadline of a collective. A meeting per
call costs up to a millisecond: it is not for timing.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from hyperparallel.errors import RunError
from hyperparallel.graph.collective import CollectiveKind, ManyCollective
from hyperparallel.graph.collective_table import COLLECTIVES, collective
from hyperparallel.runtime.comm.collectives import Transport
from hyperparallel.runtime.comm.group import Group
from hyperparallel.runtime.comm.meeting import meet_members

CallRecord = dict[str, Any]
"""One member's call: collective, dtype, shape, the arguments by name, where it stands."""

_PACKAGE = str(Path(__file__).parents[1])


class CheckedTransport:
    """Checks every call against the other members', then passes it on.

    Has a method for each collective of the table (`_checked`).
    """

    def __init__(self, transport: Transport, group: Group, timeout: timedelta) -> None:
        self.transport, self.group, self.timeout = transport, group, timeout
        self._count = 0

    def check(self, kind: CollectiveKind, x: Tensor, *args: Any) -> None:
        """Raise `RunError` unless all members make this call; waits for theirs."""
        arguments = zip(kind.arguments, map(_plain, args), strict=True)
        mine = {"collective": kind.name, "dtype": str(x.dtype), "shape": list(x.shape), **dict(arguments)}
        word = json.dumps(mine | {"where": _call_site()})
        group, seconds = self.group, self.timeout.total_seconds()
        # By name, which holds the channel: groups of the same ranks need no common order of calls.
        place, why = f"debug/{group.name}", f"make call {self._count + 1} ({kind.name}) in group {group.name}"
        calls = [
            json.loads(told)
            for told in meet_members(place, group.rank, group.ranks, word, seconds, why)
        ]
        self._count += 1
        problem = disagreement(calls)
        if problem:
            lines = [
                f"  rank {rank}: {_described(call)}"
                for rank, call in zip(self.group.ranks, calls, strict=True)
            ]
            raise RunError(
                f"collective {self._count} of group {self.group.name}: {problem}\n" + "\n".join(lines)
            )


def _checked(which: CollectiveKind | ManyCollective) -> Callable[..., Any]:
    """The method of `CheckedTransport` for a collective; of many tensors each is checked."""

    arity = 1 + len(which.single.arguments)

    def method(self: CheckedTransport, *call: Any) -> Any:
        for one in which.singles(call[:arity]):  # what follows is this member's own business
            self.check(which.single, *one)
        return getattr(self.transport, which.name)(*call)

    return method


for _name, _which in COLLECTIVES.items():
    setattr(CheckedTransport, _name, _checked(_which))


def disagreement(calls: Sequence[CallRecord]) -> str:
    """Why the members' calls do not fit together, or "".

    >>> disagreement([{"collective": "all_reduce", "dtype": "torch.float32", "shape": [n], "op": "sum"}
    ...               for n in (2, 3)])
    'shape differs'
    """
    first = calls[0]
    if any(call["collective"] != first["collective"] for call in calls):
        return "collective differs"
    kind = collective(first["collective"])
    for name in ("dtype", *(name for name in kind.arguments if name not in kind.own)):
        if any(call[name] != first[name] for call in calls):
            return f"{name} differs"
    rows = [tuple(call[name] for name in kind.arguments) for call in calls]
    return kind.misfit([tuple(call["shape"]) for call in calls], rows)


def _plain(argument: Any) -> Any:
    """An argument as JSON knows it."""
    return argument if isinstance(argument, (int, str)) else [_plain(item) for item in argument]


def _described(call: CallRecord) -> str:
    rest = {k: v for k, v in call.items() if k not in ("collective", "dtype", "shape", "where")}
    extra = ", ".join(f"{name} {value}" for name, value in rest.items())
    return f"{call['collective']} of {call['dtype']} {tuple(call['shape'])} ({extra}) at {call['where']}"


def _call_site() -> str:
    """The innermost line outside this package's runtime."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_PACKAGE):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
