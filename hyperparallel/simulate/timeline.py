"""A timeline: what every rank did when, simulated or measured, and the numbers read off it.

A span stands on a stream of a rank. Streams whose name begins with "compute" hold computation, all others
communication and copies. Of one rank's step,

    busy      time under compute spans, waits and starts of communication not counted
    exposed   time under other spans that is not busy: communication that nothing hides
    bubble    the rest: the rank neither computes nor communicates

add up to the step; the masking ratio is 1 - exposed / (time under communication). Numbers of several ranks
are means, unless one is named. Times are seconds from the step's begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

COMPUTE = "compute"
STALLS = ("start", "wait")
"""Kinds of spans that stand on a compute stream without being computation."""


class Span(NamedTuple):
    """One action: `kind` groups alike ones ("matmul", "all_reduce"), `name` tells them apart."""

    name: str
    rank: int
    stream: str
    kind: str
    begin: float
    end: float


class Sample(NamedTuple):
    """Bytes in use on a rank from a moment on."""

    seconds: float
    num_bytes: float


@dataclass(frozen=True)
class RankTimes:
    """One rank's step in parts, in seconds; communication may overlap what is busy."""

    busy: float
    communication: float
    exposed: float
    bubble: float


@dataclass(frozen=True)
class Timeline:
    """Spans in order of their begin on each stream; memory: rank -> samples in order of time.

    source: "simulated" or "measured". facts: anything worth keeping beside it (model, plan, command).
    """

    spans: tuple[Span, ...]
    memory: Mapping[int, tuple[Sample, ...]] = field(default_factory=dict)
    source: str = "simulated"
    facts: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def step_seconds(self) -> float:
        """From the first begin to the last end over all ranks."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.begin for span in self.spans)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans."""
        return tuple(sorted({span.rank for span in self.spans}))

    @cached_property
    def _by_rank(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = {rank: [] for rank in self.ranks}
        for span in self.spans:
            found[span.rank].append(span)
        return found

    def streams(self, rank: int) -> dict[str, list[Span]]:
        """A rank's spans by stream, in order of begin (and of the list, where they begin together)."""
        found: dict[str, list[Span]] = {}
        for span in self._by_rank.get(rank, ()):
            found.setdefault(span.stream, []).append(span)
        return {name: sorted(spans, key=lambda s: s.begin) for name, spans in sorted(found.items())}

    @cached_property
    def times(self) -> dict[int, RankTimes]:
        """Every rank's step in parts."""
        return {rank: self._times(spans) for rank, spans in self._by_rank.items()}

    def _times(self, spans: Sequence[Span]) -> RankTimes:
        busy, moving = [], []
        for span in spans:
            if not is_compute(span.stream):
                moving.append((span.begin, span.end))
            elif span.kind not in STALLS:
                busy.append((span.begin, span.end))
        worked, either = covered(busy), covered([*busy, *moving])
        return RankTimes(worked, covered(moving), either - worked, self.step_seconds - either)

    def _mean(self, name: str) -> float:
        every: list[float] = [getattr(times, name) for times in self.times.values()]
        return sum(every) / len(every) if every else 0.0

    @property
    def busy_share(self) -> float:
        """Share of the step in which ranks compute."""
        return self._mean("busy") / self.step_seconds if self.spans else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of the step in which ranks communicate and do not compute."""
        return self._mean("exposed") / self.step_seconds if self.spans else 0.0

    @property
    def bubble_share(self) -> float:
        """Share of the step in which ranks do nothing."""
        return self._mean("bubble") / self.step_seconds if self.spans else 0.0

    @property
    def communication_seconds(self) -> float:
        """Seconds under communication and copies, hidden or not."""
        return self._mean("communication")

    @property
    def exposed_seconds(self) -> float:
        """Seconds under communication and copies that no computation hides."""
        return self._mean("exposed")

    @property
    def masking_ratio(self) -> float:
        """Share of communication that computation hides; 1 where there is none."""
        total = self.communication_seconds
        return 1.0 - self.exposed_seconds / total if total else 1.0

    def seconds_by_kind(self) -> dict[str, float]:
        """Kind -> the sum of its spans, a mean over ranks; the largest first."""
        sums: dict[str, float] = {}
        for span in self.spans:
            sums[span.kind] = sums.get(span.kind, 0.0) + span.end - span.begin
        many = max(1, len(self.ranks))
        return {kind: sums[kind] / many for kind in sorted(sums, key=lambda k: (-sums[k], k))}

    def peak_bytes(self, rank: int | None = None) -> float:
        """The most memory in use on a rank, or on any; 0 where memory was not followed."""
        rows = self.memory.values() if rank is None else (self.memory.get(rank, ()),)
        return max((sample.num_bytes for samples in rows for sample in samples), default=0.0)

    def order(self, rank: int) -> dict[str, list[str]]:
        """Stream -> the names of its spans in order: what a rank did, without times."""
        return {stream: [s.name for s in spans] for stream, spans in self.streams(rank).items()}


def is_compute(stream: str) -> bool:
    """Whether a stream holds computation.

    >>> is_compute("compute"), is_compute("comm.tp")
    (True, False)
    """
    return stream.startswith(COMPUTE)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
