"""What the solver of one mesh axis is given, and what it gives back, as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyperparallel.shard.axis_states import SUM, AxisState, Choice, Cut, Pending

DECLARED_GATHER_FACTOR = 10.0
"""A parameter that the user declared cut is used cut unless that is ten times as dear."""
BATCH_GATHER_FACTOR = 1000.0
"""What the batch axes cut is gathered only where nothing else is possible."""
LATE = 1.0 - 1e-4
"""Reducing a gradient, and not what it is made from, is this much cheaper than it is: a view or an addition
on the way leaves the price the same, and late reductions can wait for each other and share a message."""


@dataclass(frozen=True)
class AxisTask:
    """What is settled on one axis before it is solved.

    sources: the placements that each source value may start in (one: fixed).
    sinks: the placements that a value must end in; a string instead names the source whose placement
        the value must share (a gradient and its parameter).
    declared: sources whose cut the user wrote.
    update_bytes: bytes that the optimizer touches per source value.
    """

    name: str
    size: int
    sources: Mapping[str, tuple[AxisState, ...]]
    sinks: Mapping[str, tuple[AxisState, ...] | str]
    declared: frozenset[str] = frozenset()
    update_bytes: Mapping[str, float] = field(default_factory=dict)
    pins: Mapping[str, AxisState] = field(default_factory=dict)
    """Values that must be made in the placement given (what a declared module returns)."""

    keeps_cuts: bool = False
    """A batch axis: its cut of the batch is to be computed with, not gathered away."""

    fixed: Mapping[str, Sequence[Choice]] = field(default_factory=dict)
    """Ops that the user wrote the layouts of, each with the choices that these leave."""

    reduce: str = "float32"
    """The dtype that carries reductions of 16-bit floats."""

    gradients: frozenset[str] = frozenset()
    micro_batches: int = 1
    """Per step. What a gradient still waits for in the end happens once, the program as often as this."""

    late_cuts: bool = False
    """Gradients stay whole while micro-batches are added up, also where they are cut in the end."""

    def share(self, src: AxisState, dst: AxisState) -> float:
        """What the last conversion of a gradient costs, as a fraction of its price in every micro-batch."""
        if not isinstance(src, Pending):
            return 1.0
        once = src == SUM and (not isinstance(dst, Cut) or self.late_cuts)
        return LATE / self.micro_batches if once else LATE


@dataclass
class Progress:
    """How far earlier axes have cut: ways per op and factor, and per value."""

    factors: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 1))


@dataclass(frozen=True)
class AxisDecision:
    """The choice of every op and the placement of every source on one axis, with its price."""

    name: str
    size: int
    ops: Mapping[str, Choice]
    sources: Mapping[str, AxisState]
    sinks: Mapping[str, AxisState]
    seconds: float
    bound_seconds: float
