"""One rank's program as tasks, and the same program's run as spans: the same list of actions, twice.

The program is a list of instructions: ops, and movement in two halves (start and wait): collectives, and
copies between memory tiers. Simulated, an op and both halves stand on the rank's compute stream in program
order, the movement itself on the stream that its start names; a collective moves once all members have
started it. Measured, the moments between instructions
are given, and movement lasts from its start until it was waited for (or one behind it on its stream
was). Both have the same names in the same order, so that they can be laid side by side.

Leaves out what a runtime does around a program (cutting batches): a measured timeline shows it as a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hyperparallel.cluster import Rates
from hyperparallel.errors import PlanError
from hyperparallel.simulate.task import NO_DEMAND, Task
from hyperparallel.simulate.timeline import COMPUTE, Span
from hyperparallel.workload.instruction import Axes, Instruction, collective_name


class Price(NamedTuple):
    """Seconds alone, and what is taken of links and compute units meanwhile."""

    seconds: float
    demand: Mapping[str, float] = NO_DEMAND
    units: float = 0.0


class Prices(Protocol):
    """What instructions cost."""

    def op(self, one: Instruction) -> float:
        """Seconds of an op on its own."""

    def collective(self, one: Instruction, rank: int) -> Price:
        """A started collective, once all members are there."""

    def copy(self, one: Instruction) -> Price:
        """A started copy between memory tiers."""


@dataclass(frozen=True)
class RatePrices:
    """Prices by `Rates`: the roofline, and received bytes over the bandwidth of the slowest axis.

    launch_seconds: of any op that is not free. copy_bytes_per_second: of each stream of copies.
    """

    rates: Rates
    launch_seconds: float = 0.0
    copy_bytes_per_second: Mapping[str, float] = field(default_factory=dict)

    def op(self, one: Instruction) -> float:
        if not one.flops and not one.num_bytes:
            return self.launch_seconds
        return self.launch_seconds + self.rates.compute_seconds(one.flops, one.num_bytes)

    def collective(self, one: Instruction, rank: int) -> Price:  # noqa: ARG002 -- as every price list's
        return Price(max(self.rates.collective_seconds(axis, one.num_bytes) for axis in one.axes))

    def copy(self, one: Instruction) -> Price:
        known = self.copy_bytes_per_second
        if one.stream not in known:
            raise PlanError("copy_bytes_per_second", one.stream, f"a stream with a rate: {sorted(known)}")
        return Price(one.num_bytes / known[one.stream])


Members = Callable[[int, Axes], Sequence[int]]
"""(rank, mesh axes) -> the ranks of its group, itself included."""


def program_tasks(
    programs: Mapping[int, Sequence[Instruction]], prices: Prices, members: Members | None = None
) -> list[Task]:
    """The tasks of some ranks' programs; rank -> instructions.

    members: who takes part in a collective (`mesh.group`); those that are not in `programs`, and without
    `members` all others, are taken to be there in time. All programs have the same collectives in the
    same order. Raises `PlanError` where they do not.
    """
    check_alike(programs)
    positions: dict[int, list[int]] = {}
    count = 0
    for rank, program in programs.items():
        positions[rank] = []
        for one in program:
            positions[rank].append(count)
            # A start is two tasks: the call on the compute stream, and the movement on its own.
            count += 2 if one.role == "start" else 1
    tasks: list[Task] = []
    for rank, program in programs.items():
        met = meetings(programs, rank, members)
        for i, one in enumerate(program):
            # What is read from a start is read by its wait: the movement stands right behind the start.
            needs = [positions[rank][need] + (program[need].role == "start") for need in one.needs]
            if one.role == "start":
                there = [positions[other][place] for other, place in met[i]]
                price = prices.collective(one, rank) if one.axes else prices.copy(one)
                tasks.append(Task(one.name, rank, COMPUTE, 0.0, needs, "start"))
                tasks.append(
                    Task(collective_name(one.name), rank, one.stream, price.seconds, there, one.kind,
                         price.demand, price.units, one.alloc_bytes, one.free_bytes)
                )  # fmt: skip
                continue
            kind = "wait" if one.role == "wait" else one.kind
            seconds = 0.0 if one.role == "wait" else prices.op(one)
            taken, given = one.alloc_bytes, one.free_bytes
            tasks.append(Task(one.name, rank, COMPUTE, seconds, needs, kind, NO_DEMAND, 0.0, taken, given))
    return tasks


def group_of(start: Instruction, rank: int, members: Members | None) -> Sequence[int]:
    """The ranks that take part in what a start begins: a copy is its rank's own affair."""
    return members(rank, start.axes) if members and start.axes else (rank,)


def meetings(
    programs: Mapping[int, Sequence[Instruction]], rank: int, members: Members | None
) -> dict[int, list[tuple[int, int]]]:
    """Position of a start in `rank`'s program -> (rank, position) of the starts it moves together with."""
    # Of starts only their order is known to be alike on all ranks: the n-th of one meets the n-th of another.
    places = {
        other: [i for i, one in enumerate(program) if one.role == "start" and one.axes]
        for other, program in programs.items()
    }
    number = {i: n for n, i in enumerate(places[rank])}
    return {
        i: [
            (other, places[other][number[i]] if i in number else i)
            for other in group_of(one, rank, members)
            if other in places
        ]
        for i, one in enumerate(programs[rank])
        if one.role == "start"
    }


def check_alike(programs: Mapping[int, Sequence[Instruction]]) -> None:
    """Raise `PlanError` where ranks do not have the same collectives in the same order."""
    first: list[tuple[str, Axes]] | None = None
    for rank, program in programs.items():
        collectives = [(one.kind, one.axes) for one in program if one.role == "start" and one.axes]
        if first is not None and collectives != first:
            given = f"rank {rank} with other collectives than the ranks before it"
            raise PlanError("programs", given, "the same collectives in the same order on every rank")
        first = collectives


def measured_spans(
    rank: int, program: Sequence[Instruction], moments: Sequence[float], suffix: str = ""
) -> list[Span]:
    """The spans of one run of a program.

    moments: when it began, then when each instruction was done. suffix: ends the names, where a program
    runs several times in a step.
    """
    assert len(moments) == len(program) + 1, "one moment before, and one behind each instruction"
    done = {one.needs[0]: moments[i + 1] for i, one in enumerate(program) if one.role == "wait" and one.needs}
    latest: dict[str, float] = {}
    # A stream keeps its order: movement had ended when what stands behind it on the stream had.
    for i in reversed(range(len(program))):
        if program[i].role == "start":
            stream = program[i].stream
            latest[stream] = done[i] = min(done.get(i, moments[-1]), latest.get(stream, moments[-1]))
    spans = []
    reached: dict[str, float] = {}
    for i, one in enumerate(program):
        kind = one.kind if one.role == "op" else one.role
        spans.append(Span(one.name + suffix, rank, COMPUTE, kind, moments[i], moments[i + 1]))
        if one.role == "start":
            begin = max(moments[i], reached.get(one.stream, moments[i]))
            end = reached[one.stream] = max(begin, done[i])
            name = collective_name(one.name) + suffix
            spans.append(Span(name, rank, one.stream, one.kind, begin, end))
    return spans
