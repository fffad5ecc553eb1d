"""What one op costs on one rank: the roofline seconds of its share, and what its local form exchanges.

Products count two operations per point of their iteration space, fused attention four (`OpFacts.flops`); all
else is memory traffic of the pieces it reads and writes. Views are free. Kernel efficiency, launch cost and
caches are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hyperparallel.cluster import Rates
from hyperparallel.layout import AllReduce, Move, Pend, ReduceScatter, Slice, Step
from hyperparallel.shard.axis_states import AxisState, Choice, Pending, conversion_seconds, held_bytes
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import facts_of
from hyperparallel.workload import Op, Value

SMALL_FLOATS = ("bfloat16", "float16")
ROUNDED = ("sum", "avg", "prod")
"""Reductions that lose bits in 16 bits; a maximum does not."""


def reduce_dtype(dtype: str, how: str, reduce: str) -> str:
    """The dtype in which a reduction of `dtype` over ranks is carried; reduce: that of 16-bit floats.

    >>> reduce_dtype("bfloat16", "sum", "float32"), reduce_dtype("bfloat16", "max", "float32")
    ('float32', 'bfloat16')
    """
    return "float32" if dtype in SMALL_FLOATS and how in ROUNDED and reduce == "float32" else dtype


def carried_seconds(
    src: AxisState,
    dst: AxisState,
    value: Value,
    num_bytes: float,
    n: int,
    axis: str,
    rates: Rates,
    reduce: str,
) -> float:
    """`conversion_seconds` of a value, with the casts and the bytes of a reduction in another dtype.

    num_bytes: of the value, whole on this axis, in its own dtype.
    """
    if not isinstance(src, Pending) or reduce_dtype(value.dtype, src.op, reduce) == value.dtype or src == dst:
        return conversion_seconds(src, dst, num_bytes, n, axis, rates)
    # Each cast reads 2 and writes 4 bytes of an element, or the reverse: three times its 2 bytes.
    casts = 3.0 * (num_bytes + held_bytes(num_bytes, dst, n)) / rates.memory_bytes_per_second
    return conversion_seconds(src, dst, 2.0 * num_bytes, n, axis, rates) + casts


@dataclass(frozen=True, eq=False)
class StepSeconds:
    """Seconds of a redistribution's steps by the rates that decisions are priced with: `costs` of `reshard`.

    dtype: of the value; reduce: that in which sums of 16-bit floats are carried. A step over several axes
    goes at the pace of the slowest, one between meshes at that of the links. Slices and marks of pending sums
    are views of what is there.
    """

    rates: Rates
    dtype: str
    reduce: str = "float32"

    def __call__(self, step: Step, shape: tuple[int, ...], itemsize: int) -> float:
        """Seconds of one step of a tensor of global `shape`."""
        # Nothing goes between ranks; what a copy between tiers takes is not known to `Rates`.
        if isinstance(step, (Slice, Pend, Move)):
            return 0.0
        how = step.op if isinstance(step, (AllReduce, ReduceScatter)) else ""
        widened = 1 if reduce_dtype(self.dtype, how, self.reduce) == self.dtype else 2
        moved = float(step.num_bytes(shape, itemsize * widened))
        # Between meshes no axis is crossed that would have a rate of its own.
        return max(self.rates.collective_seconds(axis, moved) for axis in step.axes or ("",))


def op_seconds(
    op: Op,
    rule: Rule,
    choice: Choice,
    taken: Mapping[str, int],
    num_bytes: Mapping[str, float],
    axis: str,
    n: int,
    rates: Rates,
) -> float:
    """Seconds of one rank's share of `op` under `choice` on an axis of n ranks.

    taken: how far outer axes cut each factor. num_bytes: of every operand and result, whole on this axis.
    """
    facts = facts_of(op.target)
    if facts.view:
        return 0.0
    touched = sum(held_bytes(num_bytes[v], p, n) for v, p in zip(op.inputs, choice.inputs, strict=True))
    for value, place in zip(op.outputs, choice.outputs, strict=True):
        if value and place:
            touched += held_bytes(num_bytes[value], place, n)
    flops = 0.0
    if facts.flops:
        loops = ((f, size) for f, size in rule.sizes.items() if f not in facts.not_looped)
        flops = facts.flops * math.prod(math.ceil(size / taken.get(f, 1)) for f, size in loops)
        # Whichever factor is cut, a rank loops over an n-th of the points.
        flops /= n if choice.factor is not None else 1
    seconds = rates.compute_seconds(flops, touched)
    if choice.inside_fraction:
        first = next(value for value in op.outputs if value)
        received = choice.inside_fraction * num_bytes[first]
        # Its bytes are those of all exchanges together; each further one pays only its latency again.
        seconds += rates.collective_seconds(axis, received) + (facts.exchanges - 1) * rates.latency_seconds
        if facts.scored:  # four exchanges in a loss, of which one pays the latency
            seconds -= 0.75 * facts.exchanges * rates.latency_seconds
    return seconds
