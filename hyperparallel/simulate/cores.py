"""Ranks that are threads of one machine: their programs on its cores, in turns.

A thread that has a core keeps it until it waits for another rank, or until its slice is over while others
want a core; then it stands behind them. A collective is work of its members' own threads: starting it copies
in, waiting for it fetches the rest once all members have started it. So while a rank waits its core is free
for another, and a span lasts from when its rank came to it, off the core or on it: as the rank's clock tells.

A copy between memory tiers moves beside the cores, as by a disk: from when it was started, behind what its
rank's stream moves already, for latency plus bytes over the tier's bandwidth. Its wait goes on when it is
through.

Leaves out the cost of a switch, wake-ups that overtake, memory bandwidth that cores share (the timings were
taken with all cores at work), and messages that need their reader before the start is through.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from hyperparallel.errors import PlanError
from hyperparallel.simulate.rank_tasks import Members, check_alike, group_of, measured_spans, meetings
from hyperparallel.simulate.timeline import Sample, Span, Timeline
from hyperparallel.workload.instruction import Instruction


class CorePrices(Protocol):
    """Core seconds of instructions, and the cores there are."""

    @property
    def cores(self) -> int: ...

    @property
    def slice_s(self) -> float: ...

    def op(self, one: Instruction) -> float: ...

    def transfer(self, start: Instruction, members: int) -> tuple[float, float]:
        """Starting a collective or a copy, and what waiting for it costs the core."""

    def copy(self, one: Instruction) -> float:
        """How long a started copy moves once its stream is free."""


def run_threads(
    programs: Mapping[int, Sequence[Instruction]], prices: CorePrices, members: Members
) -> Timeline:
    """The timeline of all ranks' programs on the cores they share; rank -> instructions.

    members: who takes part in a collective. All programs have the same collectives in the same order; raises
    `PlanError` where they do not, or where a member has no program.
    """
    check_alike(programs)
    machine = _Machine(programs, prices, members)
    machine.run()
    spans: list[Span] = []
    for rank, program in programs.items():
        spans += measured_spans(rank, program, [0.0, *machine.done[rank]])
    memory = {rank: _memory(program, machine.done[rank]) for rank, program in programs.items()}
    return Timeline(tuple(spans), {rank: samples for rank, samples in memory.items() if samples})


class _Machine:
    """Cores, the queue for them, and how far each rank has come."""

    def __init__(
        self, programs: Mapping[int, Sequence[Instruction]], prices: CorePrices, members: Members
    ) -> None:
        self.programs, self.prices, self.now = programs, prices, 0.0
        self.done: dict[int, list[float]] = {rank: [] for rank in programs}
        self.work = {rank: self._seconds(rank, members) for rank in programs}
        self.meetings = {rank: meetings(programs, rank, members) for rank in programs}
        self.needs = {rank: self._needs(rank, members) for rank in programs}
        self.left = {rank: (work[0] if work else 0.0) for rank, work in self.work.items()}
        self.queue = deque(rank for rank, work in self.work.items() if work)
        self.running: dict[int, float] = {}
        """Rank -> when its slice is over."""
        self.asleep: set[int] = set()
        self.moved: dict[tuple[int, int], float] = {}
        """(rank, position) of a started copy -> when it is through."""
        self.free: dict[tuple[int, str], float] = {}
        """(rank, stream) -> when its last copy is through."""

    def _seconds(self, rank: int, members: Members) -> list[float]:
        program = self.programs[rank]
        halves = {
            i: self.prices.transfer(one, len(group_of(one, rank, members)))
            for i, one in enumerate(program)
            if one.role == "start"
        }
        return [
            halves[i][0] if one.role == "start" else
            halves[one.needs[0]][1] if one.role == "wait" else
            self.prices.op(one)
            for i, one in enumerate(program)
        ]  # fmt: skip

    def _needs(self, rank: int, members: Members) -> dict[int, list[tuple[int, int]]]:
        """Position of a wait -> (rank, position) of the starts without which it cannot go on."""
        program = self.programs[rank]
        found: dict[int, list[tuple[int, int]]] = {}
        for i, one in enumerate(program):
            if one.role == "wait":
                start = program[one.needs[0]]
                missing = [other for other in group_of(start, rank, members) if other not in self.programs]
                if missing:
                    allowed = f"programs of all ranks, also of {missing}"
                    raise PlanError("programs", sorted(self.programs), allowed)
                meeting = self.meetings[rank].get(one.needs[0], ())
                found[i] = [there for there in meeting if there[0] != rank]
        return found

    def _copied(self, rank: int) -> float:
        """When the copy is through that a rank waits for next; 0 where it waits for none."""
        one = self.programs[rank][len(self.done[rank])]
        return self.moved.get((rank, one.needs[0]), 0.0) if one.role == "wait" else 0.0

    def _may_go_on(self, rank: int) -> bool:
        needs = self.needs[rank].get(len(self.done[rank]), ())
        met = all(len(self.done[other]) > position for other, position in needs)
        return met and self._copied(rank) <= self.now

    def run(self) -> None:
        """From one end of an instruction, a slice or a copy to the next, until all programs are through."""
        self._fill()
        while self.running or self._copies():
            step = min((self.left[rank] for rank in self.running), default=math.inf)
            # A slice ends only while somebody waits for the core.
            if self.queue:
                step = min(step, min(end - self.now for end in self.running.values()))
            step, copied = max(step, 0.0), min(self._copies(), default=math.inf)
            if copied - self.now <= step:  # to that moment itself: a sum could fall short of it
                step, self.now = copied - self.now, copied
            else:
                self.now += step
            for rank in list(self.running):
                self.left[rank] -= step
            for rank in list(self.running):
                # What subtractions leave of a finished instruction.
                if self.left[rank] <= 1e-15:
                    self._ended(rank)
            # A rank that was asleep goes before one that has just had its core.
            self._wake()
            for rank, end in list(self.running.items()):
                if self.queue and end <= self.now:
                    del self.running[rank]
                    self.queue.append(rank)
            self._fill()
        if self.asleep:
            stuck = min(self.asleep)
            name = self.programs[stuck][len(self.done[stuck])].name
            given = f"a deadlock: {name} on rank {stuck} waits for what is never started"
            raise PlanError("programs", given, "starts and waits in an order that all ranks can follow")

    def _copies(self) -> list[float]:
        """When the copies end that ranks sleep for."""
        return [end for rank in self.asleep if (end := self._copied(rank)) > self.now]

    def _start_copy(self, rank: int, place: int) -> None:
        one = self.programs[rank][place]
        stream = rank, one.stream
        end = max(self.now, self.free.get(stream, 0.0)) + self.prices.copy(one)
        self.moved[rank, place] = self.free[stream] = end

    def _ended(self, rank: int) -> None:
        one = self.programs[rank][len(self.done[rank])]
        if one.role == "start" and not one.axes:
            self._start_copy(rank, len(self.done[rank]))
        self.done[rank].append(self.now)
        place = len(self.done[rank])
        if place == len(self.work[rank]):
            del self.running[rank]
            return
        # It keeps its core for the next instruction, within its slice.
        self.left[rank] = self.work[rank][place]
        if not self._may_go_on(rank):
            del self.running[rank]
            self.asleep.add(rank)

    def _wake(self) -> None:
        for rank in sorted(self.asleep):
            if self._may_go_on(rank):
                self.asleep.discard(rank)
                self.queue.append(rank)

    def _fill(self) -> None:
        while self.queue and len(self.running) < self.prices.cores:
            self.running[self.queue.popleft()] = self.now + self.prices.slice_s


def _memory(program: Sequence[Instruction], done: Sequence[float]) -> tuple[Sample, ...]:
    """Bytes in use."""
    changes: list[tuple[float, float]] = []
    for i, one in enumerate(program):
        if one.makes:
            changes.append((done[i - 1] if i else 0.0, one.alloc_bytes))
        if one.last_reads:
            changes.append((done[i], -one.free_bytes))
    in_use, samples = 0.0, []
    for at, change in sorted(changes, key=lambda pair: pair[0]):
        in_use += change
        samples.append(Sample(at, in_use))
    return tuple(samples)
