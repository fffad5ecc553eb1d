"""Devices that are threads of one machine: the core seconds of what they do, and how they take turns.

Ranks on a laptop are threads that share cores, and a collective between them is work of their own: nothing
computes beside it. So a device of this kind is described by the time that a core spends on each kind of op
and on the two halves of a collective, as `hyperparallel doctor --calibrate` times them, and the simulator
gives out the cores (`simulate/cores.py`).

Timings repeat a call on the same memory, which caches then hold. A program finds less there: what it touched
`distance` bytes ago costs `reuse(distance) - reuse(work)` seconds more per byte (`late_seconds`).

    seconds(work) between two timings is a power law (a straight line in the logarithms); below the first it
    stays what it was there, above the last it grows as the work does.

Work is bytes read and written; of attention it is FLOPs, of a collective the bytes that a member receives.
Leaves out what other shapes of the same size cost: a figure is of the shape that was timed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hyperparallel.cluster import bounds
from hyperparallel.errors import ClusterError

Points = tuple[tuple[float, float], ...]
"""(work, core seconds), work ascending."""


@dataclass(frozen=True)
class Threads:
    """What devices do that are threads of one machine.

    cores: that all devices share. slice_s: how long a thread keeps its core while others want one.
    call_s: an op that touches no data, such as a view. kernels: op -> timings. starts, waits: "KIND of SIZE"
    (a collective of that many members) -> timings of its two halves. reuse: bytes that a thread has touched
    since it touched the same before -> core seconds per byte.
    """

    cores: int
    slice_s: float
    call_s: float
    kernels: Mapping[str, Points] = field(hash=False)
    starts: Mapping[str, Points] = field(default_factory=dict, hash=False)
    waits: Mapping[str, Points] = field(default_factory=dict, hash=False)
    reuse: Points = ()
    source: str = ""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        bounds.check_count("device.threads.cores", self.cores)
        bounds.check_bounds("device.threads.slice_s", self.slice_s, bounds.LATENCY)
        bounds.check_bounds("device.threads.call_s", self.call_s, bounds.LATENCY)
        for field_name in ("kernels", "starts", "waits"):
            for name, points in getattr(self, field_name).items():
                _check_points(f"device.threads.{field_name}.{name}", points)
        if self.reuse:
            _check_points("device.threads.reuse", self.reuse)
        if self.starts.keys() != self.waits.keys():
            allowed = f"the collectives of starts: {[*self.starts]}"
            raise ClusterError("device.threads.waits", [*self.waits], allowed)

    def late_seconds(self, accesses: Points, work: float) -> float:
        """What accesses, pairs of distance and bytes, cost more than repeated ones of `work` bytes a call."""
        if not self.reuse:
            return 0.0
        at_once = self._byte_seconds(work)
        return sum(
            num_bytes * max(0.0, self._byte_seconds(distance) - at_once) for distance, num_bytes in accesses
        )

    def _byte_seconds(self, distance: float) -> float:
        return seconds_at(self.reuse, min(distance, self.reuse[-1][0]))

    def transfer_seconds(self, kind: str, members: int, received_bytes: float) -> tuple[float, float]:
        """Core seconds of one member's start and wait; of the most similar collective that was timed."""
        if members < 2 or not self.starts:
            return self.call_s, self.call_s
        name = min(self.starts, key=lambda known: _distance(known, kind, members))
        return seconds_at(self.starts[name], received_bytes), seconds_at(self.waits[name], received_bytes)


def seconds_at(points: Points, work: float) -> float:
    """Core seconds for some work.

    >>> points = ((1e3, 1e-6), (1e5, 1e-4))
    >>> [round(seconds_at(points, work) * 1e6, 3) for work in (1.0, 1e4, 1e6)]
    [1.0, 10.0, 1000.0]
    """
    last_work, last_seconds = points[-1]
    if work >= last_work:
        # Past what was timed all is streaming: time grows as the work does.
        return last_seconds * work / last_work
    i = bisect.bisect_right([known for known, _ in points], work)
    if i == 0:
        return points[0][1]
    (low, low_seconds), (high, high_seconds) = points[i - 1], points[i]
    # A straight line between logarithms: costs are nearly powers of the work.
    share = math.log(work / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(low_seconds) + share * math.log(high_seconds))


def _distance(name: str, kind: str, members: int) -> tuple[bool, bool, float]:
    """How far a timed collective is from one of some kind and size; what only moves data is like a gather."""
    known, _, size = name.partition(" of ")
    return known != kind, known != "all_gather", abs(math.log(int(size) / members))


def _check_points(where: str, points: Points) -> None:
    works = [work for work, _ in points]
    if not points or works != sorted(set(works)) or works[0] <= 0:
        raise ClusterError(where, works, "pairs of work and seconds, work above 0 and ascending")
    for _, seconds in points:
        if not 0 < seconds < 1e4:
            raise ClusterError(where, seconds, "core seconds above 0 and below 10,000")
