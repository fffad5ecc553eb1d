"""The fewest elements a rank must receive, by exhaustive search; shares no code with the planner.

Dijkstra over all states (cuts of every dim, pending axes) with every single collective as an edge,
joint groups included, and the exact exchange as the last edge. Slow; sizes must divide.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from hyperparallel.layout import Layout

State = tuple[tuple[tuple[str, ...], ...], frozenset[str]]


def fewest_received(src: Layout, dst: Layout, shape: tuple[int, ...]) -> float:
    """For layouts of one mesh; what is pending in `dst` must be pending in `src`."""
    sizes = dict(zip(src.mesh.names, src.mesh.shape, strict=True))
    start = (src.dims, frozenset(src.partial_axes))
    kept = frozenset(dst.partial_axes)
    best, far, queue, count = math.inf, {start: 0.0}, [(0.0, 0, start)], 0
    while queue:
        so_far, _, state = heapq.heappop(queue)
        if so_far >= best:
            break
        if so_far > far[state]:
            continue
        if state[1] == kept:
            lacks = lacking(src.mesh(*state[0]), src.mesh(*dst.dims), shape)
            best = min(best, so_far + lacks)
        for price, then in edges(sizes, shape, state):
            if so_far + price < min(far.get(then, math.inf), best):
                far[then] = so_far + price
                count += 1
                heapq.heappush(queue, (far[then], count, then))
    return best


def lacking(old: Layout, new: Layout, shape: tuple[int, ...]) -> int:
    """Elements of the new piece that are not in the old one, on the rank where they are most."""
    most = 0
    for rank in old.mesh.ranks:
        have, want = old.slices(shape, rank), new.slices(shape, rank)
        size = math.prod(part.stop - part.start for part in want)
        both = [max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in zip(have, want, strict=True)]
        most = max(most, size - math.prod(both))
    return most


def edges(sizes: dict[str, int], shape: tuple[int, ...], state: State) -> Iterator[tuple[float, State]]:
    dims, pending = state
    cut = [axis for axes in dims for axis in axes]
    piece = math.prod(shape) / math.prod(sizes[axis] for axis in cut)

    def put(dim: int, axes: tuple[str, ...], base: tuple[tuple[str, ...], ...]) -> State:
        return (*base[:dim], base[dim] + axes, *base[dim + 1 :]), pending

    for axis in sizes:
        if axis not in cut and axis not in pending:
            yield from ((0, put(dim, (axis,), dims)) for dim in range(len(dims)))
    for length in range(1, len(pending) + 1):
        for axes in itertools.permutations(sorted(pending), length):
            part = 1 - 1 / math.prod(sizes[axis] for axis in axes)
            yield 2 * part * piece, (dims, pending - set(axes))
            for dim in range(len(dims)):
                yield part * piece, (put(dim, axes, dims)[0], pending - set(axes))
    for dim, have in enumerate(dims):
        for first in range(len(have)):
            axes, n = have[first:], math.prod(sizes[axis] for axis in have[first:])
            less = (*dims[:dim], have[:first], *dims[dim + 1 :])
            yield (n - 1) * piece, (less, pending)
            for other in range(len(dims)):
                if other != dim:
                    yield (1 - 1 / n) * piece, put(other, axes, less)
