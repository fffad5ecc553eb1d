"""Ways from one layout to another on one mesh, as cheap tuples with a price, before steps are built.

The price is the number of elements one rank receives. Three facts leave a handful of ways to
compare, where a search over states would visit thousands:

1. Without pending reductions nothing beats an exact exchange (`traffic.missing`); slices, then one
   all-to-all, then gathers move just as little whenever the orders of the cuts allow them.
2. A reduction costs in proportion to the piece it is done on, so everything that may shrink the piece goes
   first: cuts that the target wants (in their place, or aside where the order forbids it), and temporary cuts
   over axes along which ranks hold the same (undone by a gather at the end: with 8 x 8 ranks, 4 times fewer
   bytes than a plain reduce-scatter).
3. An all-reduce is a reduce-scatter and a gather, and is split that way where the gather is free
   because an exchange must follow anyway.

Which of these apply together is tried, not argued; `tests/layout/test_reshard.py` holds the result
against an exhaustive search. Uneven pieces are priced by the rank that receives most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyperparallel.layout.entries import Dims
from hyperparallel.layout.traffic import Traffic

Way = tuple[Any, ...]
"""One step to be: (kind, axes, what its step class takes)."""

ROUTE_FORMS = ("best", "exchange", "gather")
"""How the cut may change once all is reduced: fewest bytes, one exchange, or gathers and slices."""


@dataclass(frozen=True)
class RouteProblem:
    """What a way must do.

    traffic: the tensor's prices; reduce: (axis, op) to be finished, in the order they must be done;
    free: axes along which ranks hold the same before.
    """

    traffic: Traffic
    src: Dims
    dst: Dims
    reduce: tuple[tuple[str, str], ...] = ()
    free: tuple[str, ...] = ()


def cheapest_way(problem: RouteProblem) -> list[Way]:
    """The way with the fewest elements received, among those the one with the fewest steps."""
    if not problem.reduce:
        return _cut(problem, problem.src)[1]
    tried: dict[Dims, tuple[int, int, list[Way]]] = {}
    for choice in _choices(problem):
        price, steps, dims = _reduce(problem, *choice)
        found = (price, len(steps), steps)
        # Of choices that reduce to one cut only the cheapest goes on: what follows is the same for all.
        if dims not in tried or found[:2] < tried[dims][:2]:
            tried[dims] = found
    # What must still come is at least this; the most promising first, so that most need no exact price.
    piece, at_least = problem.traffic.lengths(problem.dst), problem.traffic.at_least
    bound = {
        dims: (price + at_least(dims, piece), num_steps + (dims != problem.dst))
        for dims, (price, num_steps, _) in tried.items()
    }
    best: list[Way] = []
    least: tuple[float, float] = (math.inf, math.inf)
    for dims in sorted(tried, key=bound.__getitem__):
        # Sorted by the bound: no later one can be better.
        if bound[dims] >= least:
            break
        price, _, steps = tried[dims]
        rest, last = _cut(problem, dims)
        score = (price + rest, len(steps) + len(last))
        if score < least:
            best, least = steps + last, score
    return best


def possible_ways(problem: RouteProblem) -> Iterator[list[Way]]:
    """Every way that some costs may like, also such as are never fewest bytes."""
    if not problem.reduce:
        for form in ROUTE_FORMS:
            yield _cut(problem, problem.src, form)[1]
        return
    for early, temporary, scattered in _choices(problem):
        _, steps, dims = _reduce(problem, early, temporary, scattered)
        for form in ROUTE_FORMS:
            yield steps + _cut(problem, dims, form)[1]


def _choices(problem: RouteProblem) -> Iterator[tuple[list[tuple[str, ...]], list[str], list[str]]]:
    """What to cut before reducing (in place, and where it disturbs least), what to scatter aside."""
    # A scalar has no dim to cut: its reductions are done whole.
    if not problem.src:
        yield [], [], []
        return
    wanted = {axis for axes in problem.dst for axis in axes}
    spare = [axis for axis in problem.free if axis not in wanted]
    whole = [axis for axis, _ in problem.reduce if axis not in wanted]
    ordered, eager = _early(problem, False), _early(problem, True)
    # What the target wants but where its place is not free yet: cut there all the same, or aside.
    late = [axis for axes in eager for axis in axes if not any(axis in done for done in ordered)]
    cuts: list[tuple[list[tuple[str, ...]], list[str]]] = [(ordered, [])]
    cuts += [(eager, []), (ordered, late)] if late else []
    for early, aside in cuts:
        lost = _out_of_order(problem, early)
        for temporary in (aside, aside + spare) if spare else (aside,):
            for scattered in ([], whole) if whole else ([],):
                yield early, temporary, scattered
                if lost:
                    yield early, temporary, scattered + lost


def _out_of_order(problem: RouteProblem, early: list[tuple[str, ...]]) -> list[str]:
    """Axes to be reduced whose place in the target comes after something that is not there yet."""
    reduced = {axis for axis, _ in problem.reduce}
    found = []
    for have, new, want in zip(problem.src, early, problem.dst, strict=True):
        # A reduce-scatter puts its axes behind the cuts that are there.
        ends = tuple(axis for axis in want if axis in reduced)
        astray = _rest(have + new + ends, want)
        found += [axis for axis in ends if axis in astray]
    return found


def _early(problem: RouteProblem, eager: bool) -> list[tuple[str, ...]]:
    """Per dim the free axes to cut at once; only those already in their final order unless eager."""
    found = []
    for have, want in zip(problem.src, problem.dst, strict=True):
        if eager:
            found.append(tuple(axis for axis in want if axis in problem.free))
            continue
        last = first = len(have)
        if want[:first] == have:
            while last < len(want) and want[last] in problem.free:
                last += 1
        found.append(want[first:last])
    return found


def _reduce(
    problem: RouteProblem, early: list[tuple[str, ...]], temporary: list[str], scattered: list[str]
) -> tuple[int, list[Way], Dims]:
    """Cut, then reduce: the price, the steps, and how the dims are cut afterwards.

    temporary: axes to cut at once wherever they disturb least; scattered: axes to be reduced that
    end in such places, in pieces, instead of whole.
    """
    dims = [have + new for have, new in zip(problem.src, early, strict=True)]
    cuts = list(early)
    for dim, extra in place_axes(problem, dims, temporary, _quiet(problem, dims)):
        cuts[dim] += extra
        dims[dim] += extra
    steps: list[Way] = [("slice", axes, dim) for dim, axes in enumerate(cuts) if axes]
    price = 0
    for op, axes in by_op(problem.reduce):
        direct = [axis for axis in axes if axis not in scattered]
        ends = [tuple(axis for axis in want if axis in direct) for want in problem.dst]
        aside = [axis for axis in axes if axis in scattered]
        if aside:
            now = [have + end for have, end in zip(dims, ends, strict=True)]
            for dim, more in place_axes(problem, now, aside, _quiet(problem, now)):
                ends[dim] += more
        for dim in _least_waste_first(problem, dims, ends):
            paid, groups = _scatter(problem, dims, dim, ends[dim])
            price += paid
            dims[dim] += ends[dim]
            steps += [("reduce_scatter", group, dim, op) for group in groups]
        ended = {axis for end in ends for axis in end}
        # In mesh order, as groups over several axes are made.
        rest = tuple(axis for axis in problem.traffic.sizes if axis in axes and axis not in ended)
        if rest:
            steps.append(("all_reduce", rest, op))
            n = _product(problem.traffic.sizes, rest)
            # As `AllReduce.num_elements` counts: a reduce-scatter and a gather of the rounded-up share.
            price += 2 * (n - 1) * -(-problem.traffic.largest(dims) // n)
    return price, steps, tuple(dims)


def _least_waste_first(
    problem: RouteProblem, dims: list[tuple[str, ...]], ends: list[tuple[str, ...]]
) -> list[int]:
    """Dims to be scattered over, those that divide first: a rounded-up piece costs what follows."""
    chosen = [dim for dim, end in enumerate(ends) if end]
    if len(chosen) < 2:
        return chosen
    old = problem.traffic.lengths(dims)
    new = problem.traffic.lengths([have + end for have, end in zip(dims, ends, strict=True)])

    def waste(dim: int) -> float:
        return new[dim] * _product(problem.traffic.sizes, ends[dim]) / max(old[dim], 1)

    return sorted(chosen, key=waste)


def _scatter(
    problem: RouteProblem, dims: list[tuple[str, ...]], dim: int, end: tuple[str, ...]
) -> tuple[int, list[tuple[str, ...]]]:
    """The price of reduce-scatters over the axes of `end`: one, or one each if that is less.

    Pieces that divide cost the same either way; one joint scatter of few rows over many ranks
    rounds every rank's share up to a row, where the inner of two works on few rows already.
    """
    sizes, traffic = problem.traffic.sizes, problem.traffic
    now = list(dims)
    now[dim] += end
    joint = (_product(sizes, end) - 1) * traffic.largest(now)
    if len(end) == 1:
        return joint, [end]
    single, now = 0, list(dims)
    for axis in end:
        now[dim] += (axis,)
        single += (sizes[axis] - 1) * traffic.largest(now)
    return (single, [(axis,) for axis in end]) if single < joint else (joint, [end])


def by_op(reduce: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Neighbouring reductions with one operation, together."""
    found: list[tuple[str, list[str]]] = []
    for axis, op in reduce:
        if not found or found[-1][0] != op:
            found.append((op, []))
        found[-1][1].append(axis)
    return found


def _quiet(problem: RouteProblem, dims: list[tuple[str, ...]]) -> list[int]:
    """Dims on which more cuts disturb no order: all that the target wants of them is there."""
    both = zip(dims, problem.dst, strict=True)
    return [dim for dim, (have, want) in enumerate(both) if want == have[: len(want)]]


def place_axes(
    problem: RouteProblem, dims: list[tuple[str, ...]], axes: list[str], quiet: list[int]
) -> list[tuple[int, tuple[str, ...]]]:
    """Dims for axes that may cut any: one that all divide, else each where least is rounded up."""
    if not axes:
        return []
    left = problem.traffic.lengths(dims)
    among = quiet or list(range(len(dims)))
    count = _product(problem.traffic.sizes, tuple(axes))
    # A dim that all the axes divide keeps pieces equal, so that nothing is rounded up.
    best = max(among, key=lambda dim: (left[dim] % count == 0, left[dim]))
    if left[best] % count == 0:
        return [(best, tuple(axes))]
    found: dict[int, tuple[str, ...]] = {}
    for axis in axes:
        size = problem.traffic.sizes[axis]
        best = max(among, key=lambda dim: ((-left[dim] // size) / max(left[dim], 1), left[dim]))
        left[best] = -(-left[best] // size)
        found[best] = (*found.get(best, ()), axis)
    return list(found.items())


def _cut(problem: RouteProblem, src: Dims, form: str = "best") -> tuple[int, list[Way]]:
    """From one cut to another with nothing to reduce; form: best, or always exchange, or gather."""
    if src == problem.dst:
        return 0, []
    least = problem.traffic.missing(src, problem.dst)
    steps = None if form == "exchange" else _collectives(problem, src)
    if steps is None and form == "gather":
        steps = _gather_all(src, problem.dst)
    if steps is not None:
        price = _priced(problem, src, steps)
        # Collectives that move no more than the exact exchange are taken before it: libraries know them, and
        # an exchange is an all-to-all of uneven blocks.
        if price <= least or form == "gather":
            return price, steps
    leaving = {axis for have, want in zip(src, problem.dst, strict=True) for axis in _rest(have, want)}
    axes = tuple(axis for axis in problem.traffic.sizes if axis in leaving)
    return least, [("permute", axes, problem.dst)]


def _collectives(problem: RouteProblem, src: Dims) -> list[Way] | None:
    """Slices, at most one all-to-all, gathers; None where these alone would move too much."""
    slices: list[Way] = []
    gathers: list[Way] = []
    moved_from: tuple[int, tuple[str, ...]] | None = None
    moved_to: tuple[int, tuple[str, ...]] | None = None
    cut = {axis for axes in src for axis in axes}
    wanted = {axis for axes in problem.dst for axis in axes}
    for dim, (have, want) in enumerate(zip(src, problem.dst, strict=True)):
        old, new = _rest(have, want), _rest(want, have)
        # A dim that both loses and gains cuts is no slice, gather or all-to-all.
        if old and new:
            return None
        if new:
            fresh, moved = _run(new, cut)
            # One all-to-all at most, and only of axes that cut something now.
            if (moved and moved_to) or any(axis not in cut for axis in moved):
                return None
            slices += [("slice", fresh, dim)] if fresh else []
            moved_to = (dim, moved) if moved else moved_to
        if old:
            gone, moved = _run(old, wanted)
            if (moved and moved_from) or any(axis not in wanted for axis in moved):
                return None
            gathers += [("all_gather", gone, dim)] if gone else []
            moved_from = (dim, moved) if moved else moved_from
    if moved_from is None or moved_to is None:
        return slices + gathers
    # An all-to-all keeps the order of its axes.
    if moved_from[1] != moved_to[1]:
        return None
    return [*slices, ("all_to_all", moved_from[1], moved_from[0], moved_to[0]), *gathers]


def _gather_all(src: Dims, dst: Dims) -> list[Way]:
    """Gather what differs, then slice: only collectives, many bytes."""
    gathers: list[Way] = []
    slices: list[Way] = []
    for dim, (have, want) in enumerate(zip(src, dst, strict=True)):
        old, new = _rest(have, want), _rest(want, have)
        gathers += [("all_gather", old, dim)] if old else []
        slices += [("slice", new, dim)] if new else []
    return gathers + slices


def _priced(problem: RouteProblem, src: Dims, steps: list[Way]) -> int:
    if len(steps) == 1:
        return problem.traffic.missing(src, problem.dst)
    price, now = 0, src
    for step in steps:
        then = after(now, step)
        if step[0] != "slice":
            price += problem.traffic.missing(now, then)
        now = then
    return price


def after(dims: Dims, step: Way) -> Dims:
    """How the dims are cut after a step.

    >>> after((("a", "b"), ()), ("all_to_all", ("b",), 0, 1))
    (('a',), ('b',))
    """
    kind, axes = step[0], step[1]
    if kind == "permute":
        return tuple(step[2])
    now = list(dims)
    if kind in ("slice", "reduce_scatter"):
        now[step[2]] += axes
    elif kind in ("all_gather", "all_to_all"):
        now[step[2]] = now[step[2]][: -len(axes)]
        if kind == "all_to_all":
            now[step[3]] += axes
    return tuple(now)


def _rest(axes: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """What stands after the common beginning of two cuts."""
    same = 0
    for mine, theirs in zip(axes, other, strict=False):
        if mine != theirs:
            break
        same += 1
    return axes[same:]


def _run(axes: tuple[str, ...], known: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The leading axes that are not known, and the others."""
    first = 0
    while first < len(axes) and axes[first] not in known:
        first += 1
    return axes[:first], axes[first:]


def _product(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    product = 1
    for axis in axes:
        product *= sizes[axis]
    return product
