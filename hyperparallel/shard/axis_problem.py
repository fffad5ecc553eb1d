"""What the solver of one mesh axis is given, and what it gives back, as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyperparallel.shard.axis_states import (
    PENDING_SUM,
    AxisState,
    Choice,
    Cut,
    Pending,
    inner_key,
    period_key,
)
from hyperparallel.workload import Workload

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
        # What is not pending is converted in every micro-batch.
        if not isinstance(src, Pending):
            return 1.0
        # Only a sum can wait until micro-batches are added up, and not where they are added up cut, which
        # takes a reduce-scatter of each.
        once = src == PENDING_SUM and (not isinstance(dst, Cut) or self.late_cuts)
        return LATE / self.micro_batches if once else LATE


@dataclass
class Progress:
    """How far earlier axes have cut: ways per op and factor, and per value."""

    factors: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 1))

    def record(self, workload: Workload, decision: AxisDecision) -> None:
        """Note what an axis cuts."""
        n = decision.size
        for op in workload.ops:
            choice = decision.ops[op.name]
            if choice.factor is not None:
                factors = self.factors[op.name]
                counted = [choice.factor]
                # A cut inside a factor counts twice: fewer of its points are left on a rank, as of any cut,
                # and the next axis must divide what is left of a period.
                if choice.period:
                    counted.append(inner_key(choice.factor))
                    factors[period_key(choice.factor)] = choice.period
                for key in counted:
                    factors[key] = factors.get(key, 1) * n
            for value, place in zip(op.outputs, choice.outputs, strict=True):
                if value is not None and isinstance(place, Cut):
                    self.values[value] *= n
        for value, place in decision.sources.items():
            if isinstance(place, Cut):
                self.values[value] *= n


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


def constant_ops(workload: Workload, random: frozenset[str] = frozenset()) -> frozenset[str]:
    """Ops that depend on no parameter, input or tangent, so that they run once and not every step."""
    # A buffer that a step changes (the running mean of a batch norm) is another value in the next one.
    changing = {workload.buffers[name] for name in workload.mutations if name in workload.buffers}
    varying = {*workload.params.values(), *workload.inputs.values(), *workload.tangents.values()}
    varying |= changing
    constant = set()
    for op in workload.ops:
        if op.name in random or any(value in varying for value in op.inputs):
            varying.update(o for o in op.outputs if o)
        else:
            constant.add(op.name)
    return frozenset(constant)
