"""What one mesh axis may do to one tensor and to one op.

On one axis of n ranks a tensor is whole (`WHOLE`), pending a reduction (`Pending("sum")`), or cut
(`Cut`). A cut says which dim, and how its elements are dealt: the dim is seen as repeats of `period`
elements, each repeat is divided among the n ranks in multiples of `unit`. A plain cut of a dim of size
s has period s and unit 1; a cut of the inner factor of a merged dim has a smaller period; a cut that
does not divide evenly and must not split an inner factor has a larger unit. Two ops that look at one
dim through different factors thus agree on the name exactly when they agree on the elements.

`choices(rule, ...)` lists what an op can do on the axis: run whole, cut one factor of its rule, or let a
pending sum through. Conversions between placements are priced here too; how they are carried out is
`layout.reshard`'s business.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hyperparallel.cluster import Rates
from hyperparallel.shard.rules.rule import FactorDims, Rule


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank of the axis holds all elements."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class Pending:
    """Every rank holds a summand (or candidate) of shape equal to the whole."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"pending {self.op}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements of `dim` dealt out within every `period`, in multiples of `unit`."""

    dim: int
    period: int
    unit: int = 1

    def __str__(self) -> str:
        return f"cut dim {self.dim}" + (f" within {self.period}" if self.unit == 1 else " unevenly")


AxisState = Whole | Pending | Cut
WHOLE = Whole()
PENDING_SUM = Pending("sum")


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run an op on one axis: what it takes, what it gives, which factor is cut."""

    inputs: tuple[AxisState, ...]
    outputs: tuple[AxisState | None, ...]
    factor: str | None
    unit: int = 1
    """The factor is cut in multiples of this (only where it does not divide evenly)."""
    period: int = 0
    """Not the whole factor is cut but every `period` of it (heads within batch x heads); 0: whole."""
    inside_fraction: float = 0.0
    """Bytes that the local form exchanges by itself, as a fraction of the first output."""


def cut_of(
    dims: FactorDims,
    factor: str,
    sizes: Mapping[str, int],
    taken: Mapping[str, int],
    n: int,
    unit: int = 1,
    period: int = 0,
) -> AxisState:
    """The placement of a tensor whose `factor` is cut n ways; `taken` says how far outer axes cut it.

    unit, period: as in `Choice`.

    >>> cut_of((("b", "s"), ("h",)), "s", {"b": 2, "s": 16, "h": 8}, {}, 2)
    Cut(dim=0, period=16, unit=1)
    >>> cut_of((("b", "s"), ("h",)), "o", {"b": 2, "s": 16, "h": 8}, {}, 2)
    Whole()
    """
    for dim, factors in enumerate(dims):
        if factor in factors:
            # Elements of the dim that one step along the factor passes: the product of the factors inside it.
            stride = math.prod(sizes[f] for f in factors[factors.index(factor) + 1 :])
            if period:
                return Cut(dim, stride * period // taken.get(inner_key(factor), 1))
            # Rounded up as cuts are: the period is that of the first rank's piece, the largest.
            remaining = math.ceil(sizes[factor] / taken.get(factor, 1))
            # Where pieces differ, they must not end inside a factor that stands inside this one.
            even = sizes[factor] % (taken.get(factor, 1) * n) == 0
            return Cut(dim, stride * remaining, 1 if even else stride * unit)
    return WHOLE


def uneven_units(rules: Iterable[Rule], n: int) -> dict[int, set[int]]:
    """Dim size -> multiples in which it is cut where views show it as a factor that n does not divide.

    A batch of 3 viewed as rows of 3 x 16 is cut between samples: {48: {16}}.
    """
    units: dict[int, set[int]] = {}
    for rule in rules:
        for dims in (*rule.inputs, *rule.outputs):
            for factors in dims or ():
                stride = math.prod(rule.sizes[f] for f in factors)
                total = stride
                for factor in factors[:-1]:
                    stride //= max(rule.sizes[factor], 1)
                    if rule.sizes[factor] % n:
                        units.setdefault(total, set()).add(stride)
    return units


def inner_periods(rules: Iterable[Rule], n: int) -> dict[int, set[int]]:
    """Dim size -> the periods in which views show that it can be cut inside.

    A batch of 2 and 8 heads viewed as 16: {16: {8}}, one head of every sample after the other.
    """
    periods: dict[int, set[int]] = {}
    for rule in rules:
        for dims in (*rule.inputs, *rule.outputs):
            for factors in dims or ():
                total = period = math.prod(rule.sizes[f] for f in factors)
                for outer, factor in itertools.pairwise(factors):
                    period //= max(rule.sizes[outer], 1)
                    if rule.sizes[factor] % n == 0 and 0 < period < total:
                        periods.setdefault(total, set()).add(period)
    return periods


def inner_key(factor: str) -> str:
    """Where `taken` says how far the periods of a factor are cut."""
    return f"{factor}/inner"


def period_key(factor: str) -> str:
    """Where `taken` says which period of a factor is cut."""
    return f"{factor}/period"


def choices(
    rule: Rule,
    taken: Mapping[str, int],
    n: int,
    units: Mapping[int, Iterable[int]] | None = None,
    periods: Mapping[int, Iterable[int]] | None = None,
) -> list[Choice]:
    """Every way to run an op with `rule` on an axis of n ranks (the first is: whole).

    units: from `uneven_units`; factors of those sizes may also be cut in those multiples. periods: from
    `inner_periods`, for an op whose local form does not care which elements of a factor it gets.
    """
    everything_whole = Choice(
        tuple(WHOLE for _ in rule.inputs), tuple(None if o is None else WHOLE for o in rule.outputs), None
    )
    found = [everything_whole]
    for factor, size in rule.sizes.items():
        before = taken.get(factor, 1)
        # With fewer elements than ranks some ranks would have none.
        if factor in rule.blocked or size < before * n:
            continue
        # A cut that divides ends between inner factors by itself.
        coarser = sorted((units or {}).get(size, ())) if size % (before * n) else ()
        ways = [(unit, 0) for unit in (1, *coarser)]
        ways += [(1, p) for p in _periods(factor, size, taken, n, periods or {})]
        for unit, period in ways:
            choice = _cutting(rule, factor, taken, n, unit, period)
            if choice is not None:
                found.append(choice)
    outputs_pending = tuple(None if o is None else PENDING_SUM for o in rule.outputs)
    # On this axis the operands beside a pending one must be whole: summands times pieces would be sums of
    # products of other elements.
    for group in rule.linear:
        inputs = tuple(PENDING_SUM if i in group else WHOLE for i in range(len(rule.inputs)))
        found.append(Choice(inputs, outputs_pending, None))
    return found


def _periods(
    factor: str,
    size: int,
    taken: Mapping[str, int],
    n: int,
    periods: Mapping[int, Iterable[int]],
) -> list[int]:
    """Periods of a factor that n more ranks can cut; outer axes that cut one have settled which."""
    # A `FactorCut` has one period for all axes that cut inside it.
    settled = taken.get(period_key(factor))
    left = taken.get(inner_key(factor), 1) * n
    return [
        p for p in sorted(periods.get(size, ())) if p % left == 0 and settled in (None, p)
    ]


def _cutting(
    rule: Rule, factor: str, taken: Mapping[str, int], n: int, unit: int, period: int
) -> Choice | None:
    """Cut one factor; None where that leaves something that cannot be reduced, or cuts nothing."""
    inside = (rule.inside or {}).get(factor)
    placed_in = tuple(cut_of(dims, factor, rule.sizes, taken, n, unit, period) for dims in rule.inputs)
    placed_out: list[AxisState | None] = []
    for dims in rule.outputs:
        place = None if dims is None else cut_of(dims, factor, rule.sizes, taken, n, unit, period)
        # An output without the factor is only this rank's share of a reduction, unless the local form
        # finishes it.
        if place == WHOLE and inside is None:
            if rule.reduce is None:
                return None
            place = Pending(rule.reduce)
        placed_out.append(place)
    if not is_cut((*placed_in, *placed_out)):
        return None
    return Choice(placed_in, tuple(placed_out), factor, unit, period, inside or 0.0)


def conversion_seconds(
    src: AxisState, dst: AxisState, num_bytes: float, n: int, axis: str, rates: Rates
) -> float:
    """Seconds to turn `src` into `dst` for a tensor of `num_bytes` (whole on this axis).

    Infinite where it makes no sense. Slicing and marking a whole value as pending touch memory only.
    """
    if src == dst:
        return 0.0
    share = (n - 1) / n
    memory = num_bytes / rates.memory_bytes_per_second
    if isinstance(src, Whole):
        if isinstance(dst, Cut):
            return memory / n * 0.5
        return memory if dst == PENDING_SUM else math.inf
    if isinstance(dst, Pending):
        return math.inf
    if isinstance(src, Cut):
        # What one rank receives: of a gather every piece but its own, of an all-to-all (n - 1) / n of one
        # piece.
        moved = share * num_bytes if isinstance(dst, Whole) else share * num_bytes / n
    else:
        # An all-reduce is a reduce-scatter and a gather of the same bytes.
        moved = share * num_bytes * (2 if isinstance(dst, Whole) else 1)
    return rates.collective_seconds(axis, moved) + memory / n


def held_bytes(num_bytes: float, placement: AxisState, n: int) -> float:
    """Bytes that one rank holds of a tensor of `num_bytes`."""
    return num_bytes / n if isinstance(placement, Cut) else num_bytes


def is_cut(placements: Sequence[AxisState | None]) -> bool:
    """Whether any of the placements is a cut."""
    return any(isinstance(place, Cut) for place in placements)
