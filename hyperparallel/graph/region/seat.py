"""Where the code of a region is running: as which rank of which mesh, and how it reaches the others.

A region's code calls `axis_index` or `all_reduce` without saying who it is; the seat that is set around
the call knows. Seats differ in how a collective is carried out: alone (one rank, nothing to do), met (all
ranks as threads of this process that wait for one another, `meet`), or traced (`rehearsal.py`). The seat is a
context variable, set only while a region's code runs, because that code is the user's and takes no
argument of ours.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyperparallel.errors import UserError, nearest
from hyperparallel.graph.collective import GroupMember
from hyperparallel.layout import Mesh

T = TypeVar("T")
_SEAT: contextvars.ContextVar[Seat | None] = contextvars.ContextVar("hyperparallel_seat", default=None)


@dataclass
class Seat:
    """One rank inside a region called `region`; without a mesh it is alone and every axis has size one."""

    region: str
    mesh: Mesh | None = None
    rank: int = 0
    number: int = field(default=0, init=False)
    """How many collectives this rank has begun."""

    def axes(self, axis: str | Sequence[str]) -> tuple[str, ...]:
        """The mesh axes of a call, checked."""
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        if self.mesh is not None:
            for name in axes:
                if name not in self.mesh.names:
                    known = ", ".join(self.mesh.names)
                    near = nearest(name, self.mesh.names)
                    raise UserError(f"axis in {self.region}", name, f"one of {known}", near)
        if len(set(axes)) != len(axes) or not axes:
            raise UserError(f"axis in {self.region}", axis, "one axis or several different ones")
        return axes

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks of this rank's group along `axes`, in order."""
        return (self.rank,) if self.mesh is None else self.mesh.group(self.rank, axes)

    def index(self, axes: tuple[str, ...]) -> int:
        """The position of this rank in its group."""
        return self.members(axes).index(self.rank)

    def member(self, axes: tuple[str, ...]) -> GroupMember:
        """This rank in its group along `axes`."""
        return GroupMember(self.index(axes), len(self.members(axes)))

    def shapes(self, call: tuple[Any, ...], axes: tuple[str, ...], x: Tensor) -> list[tuple[int, ...]]:
        """The shape of the operand on every member of the group; `call` must be the same on all ranks."""
        return [tuple(x.shape)]

    def run(self, name: str, x: Tensor, axes: tuple[str, ...], *args: Any) -> Tensor:
        """Carry a collective out."""
        return x


def seat() -> Seat:
    """The seat of the code that is running; `UserError` outside a region."""
    found = _SEAT.get()
    if found is None:
        raise UserError("call", "outside a region", "code inside hp.local_region", "hp.local_region(fn, ...)")
    return found


def seated() -> bool:
    """Whether the code of a region is running."""
    return _SEAT.get() is not None


def sit(place: Seat, body: Callable[..., T], *args: Any) -> T:
    """Run `body(*args)` on a seat."""
    before = _SEAT.set(place)
    try:
        return body(*args)
    finally:
        _SEAT.reset(before)


class Meeting:
    """A place where `count` threads show each other one thing at a time."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._shown: list[Any] = [None] * count

    def exchange(self, place: int, thing: Any) -> list[Any]:
        """Show `thing`; returns what everybody showed, by place."""
        self._shown[place] = thing
        self._barrier.wait()
        found = list(self._shown)
        self._barrier.wait()
        return found

    def end(self) -> None:
        """Wake everybody who waits: they raise `threading.BrokenBarrierError`."""
        self._barrier.abort()


@dataclass
class MetSeat(Seat):
    """A rank that is one of several threads; `meeting` is where they meet at every collective."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def meet(self, call: tuple[Any, ...], axes: tuple[str, ...], thing: Any) -> list[Any]:
        """Show a thing to the whole mesh; returns what the members of the group along `axes` showed."""
        assert self.mesh is not None
        ranks = self.mesh.ranks
        # The whole mesh meets, not the group only: a rank that calls something else is noticed at once.
        rows = self.meeting.exchange(ranks.index(self.rank), (call, thing))
        first = rows[0][0]
        for rank, (other, _) in zip(ranks, rows, strict=True):
            if other != first:
                raise UserError(
                    f"collectives of {self.region}",
                    f"rank {ranks[0]} {_said(first)} while rank {rank} {_said(other)}",
                    "the same collectives in the same order on every rank (code that branches on "
                    "axis_index may compute differently, not communicate differently)",
                )
        return [rows[ranks.index(member)][1] for member in self.members(axes)] if axes else []

    def shapes(self, call: tuple[Any, ...], axes: tuple[str, ...], x: Tensor) -> list[tuple[int, ...]]:
        return self.meet(call, axes, tuple(x.shape))


DONE = ("returns",)


def _said(call: tuple[Any, ...]) -> str:
    return "returns" if call == DONE else f"calls {call[0]}{call[1:]}"


def meet(mesh: Mesh, make: Callable[[int, Meeting], MetSeat], body: Callable[[int], T]) -> list[T]:
    """`body(rank)` as every rank of a mesh at once, each in a thread and on a seat; results in mesh order.

    Raises what the first rank raised that was not merely left waiting.
    """
    meeting = Meeting(mesh.size)
    results: list[Any] = [None] * mesh.size
    errors: list[BaseException | None] = [None] * mesh.size
    grad = torch.is_grad_enabled()

    def rank_of(place: int) -> None:
        mine = make(mesh.ranks[place], meeting)
        try:
            with torch.set_grad_enabled(grad):
                results[place] = sit(mine, body, mesh.ranks[place])
                mine.meet(DONE, (), None)
        except BaseException as error:
            errors[place] = error
            meeting.end()

    threads = [threading.Thread(target=rank_of, args=(i,), daemon=True) for i in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A broken barrier only says that another rank failed: what that one raised is the reason.
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results


def aside(body: Callable[[], T]) -> T:
    """`body()` in a thread of its own, where no mode, trace or grad mode of this one is active."""
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(body())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]
