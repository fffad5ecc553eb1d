"""What a launcher and its ranks say to each other over the pipe of each rank.

    launcher -> rank    RankRequest.STOP    end soon; nothing is answered
                        RankRequest.WHERE   answered by a `Where`, from a thread of the rank's own
    rank -> launcher    Failure             as soon as it is known
                        Where               the answer
                        (value,)            the result, the last thing that a rank says

Pickles, since both ends are one user's processes of one program.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hyperparallel.runtime.comm.meeting import meet_members

_PACKAGE = str(Path(__file__).parents[2])
_TORCH = os.path.join("site-packages", "torch")


class RankRequest(enum.Enum):
    """What a launcher asks of a rank."""

    STOP = "stop"  # leave after the step at hand, or at once where nobody looks for it
    WHERE = "where"  # say which step this is, and what the main thread is doing


@dataclass(frozen=True)
class Failure:
    """How one rank failed. step: -1 outside any step; lost: it only saw that a peer went away."""

    rank: int
    step: int
    summary: str
    trace: str
    lost: bool


@dataclass(frozen=True)
class Where:
    """Where one rank is. step: -1 outside any step; doing: what its main thread does, in words."""

    rank: int
    step: int
    doing: str

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step >= 0 else "no step"
        return f"rank {self.rank} is in {step}, {self.doing}"


def what_main_does() -> str:
    """What this process's main thread is doing, read off its stack from any thread.

    Costs nothing until it is asked: a collective under way is an object whose method waits, so it stands
    on the stack with its group.
    """
    # The thread goes on while it is looked at: the answer may be a moment old.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = list(_outwards(frame))
    if not stack:
        return "about to end"
    waits = next(filter(None, map(_awaited, stack)), "")
    line = next(filter(_is_own, stack), stack[0])
    at = f"at {line.f_code.co_filename}:{line.f_lineno} in {line.f_code.co_name}"
    return f"waiting for {waits}, {at}" if waits else at


def _is_own(frame: FrameType) -> bool:
    """Whether a line is the caller's, neither this package's nor torch's."""
    file = frame.f_code.co_filename
    return not file.startswith((_PACKAGE, "<")) and _TORCH not in file


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaited(frame: FrameType) -> str:
    """What a frame waits for, if it is one of ours that does."""
    if not frame.f_code.co_filename.startswith(_PACKAGE):
        return ""
    name, held = frame.f_code.co_name, frame.f_locals
    if name == meet_members.__name__:
        return f"ranks {', '.join(map(str, held.get('missing', ())))} to {held.get('why', 'meet')}"
    pending: Any = held.get("self")
    group = getattr(pending, "group", None) or getattr(getattr(pending, "transport", None), "group", None)
    if name != "wait" or group is None:
        return ""
    return f"{getattr(pending, 'op', 'a collective')} of group {group.name} (ranks {group.ranks})"
