"""From one layout to another: the cheapest explicit steps, on one mesh or across two.

On one mesh the ways of `routes.py` are compared, by the bytes one rank receives (then by the number
of steps), or by the seconds that the caller's `costs` gives each step. Across meshes: reductions
are finished on the source, pieces go straight to the ranks that need them (each part once, cut over
all ranks that will hold the same), and gathers complete it on the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from hyperparallel.layout.entries import DEVICE
from hyperparallel.layout.exchange import most_received, most_sent
from hyperparallel.layout.layout import Layout, _intern, make_layout
from hyperparallel.layout.routes import (
    RouteProblem,
    Way,
    after,
    by_op,
    cheapest_way,
    place_axes,
    possible_ways,
)
from hyperparallel.layout.shards import check_shape
from hyperparallel.layout.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Move,
    Pend,
    Permute,
    ReduceScatter,
    SendRecv,
    Slice,
    Step,
)
from hyperparallel.layout.traffic import Traffic

Costs = Callable[[Step, tuple[int, ...], int], float]
"""Seconds of a step, for a tensor of that global shape and item size in bytes."""

_KINDS: dict[str, Any] = {
    "slice": Slice,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_reduce": AllReduce,
    "all_to_all": AllToAll,
}


def reshard(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    itemsize: int = 4,
    costs: Costs | None = None,
) -> tuple[Step, ...]:
    """The cheapest steps from `src` to `dst` for a tensor of global shape `shape`.

    itemsize: bytes per element; costs: seconds of a step, if not given the bytes that one rank
    receives are what counts. Raises LayoutError if a layout is for another number of dims.

    >>> from hyperparallel.layout import Mesh
    >>> mesh = Mesh((2, 2), ("dp", "tp"))
    >>> for step in reshard(mesh("dp", None, partial={"tp": "sum"}), mesh("dp", "tp"), (4, 6)):
    ...     print(step)
    ReduceScatter(dim=1, op='sum') over (tp): ("dp", None, partial={"tp": "sum"}) -> ("dp", "tp")
    """
    return _cached(src, dst, tuple(shape), itemsize, costs)


def find_steps(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int = 4,
    costs: Costs | None = None,
) -> tuple[Step, ...]:
    """`reshard` without its cache."""
    check_shape(src.dims, shape)
    check_shape(dst.dims, shape)
    if src == dst:
        return ()
    if (src.tier, dst.tier) != (DEVICE, DEVICE):
        return _by_way_of_device(src, dst, shape, itemsize, costs)
    if src.mesh == dst.mesh:
        return _on_one_mesh(src, dst, shape, itemsize, costs)
    return _across(src, dst, shape, itemsize, costs)


_cached = lru_cache(maxsize=65536)(find_steps)


def _by_way_of_device(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, costs: Costs | None
) -> tuple[Step, ...]:
    """Collectives run on the device: what lies elsewhere is fetched before them and stored after them."""
    if src.replace(tier=dst.tier) == dst:
        return (Move((), src, dst),)
    first, last = src.replace(tier=DEVICE), dst.replace(tier=DEVICE)
    fetch = (Move((), src, first),) if src != first else ()
    store = (Move((), last, dst),) if last != dst else ()
    return (*fetch, *find_steps(first, last, shape, itemsize, costs), *store)


def _on_one_mesh(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, costs: Costs | None
) -> tuple[Step, ...]:
    # Cuts never wait for a new pending sum: it is the last step, and moves nothing.
    finish, kept = _to_finish(src, dst)
    pend = [(axis, op) for axis, op in dst.partial if axis not in kept]
    problem = RouteProblem(Traffic(src.mesh._sizes, shape), src.dims, dst.dims, finish, src.free_axes)
    if costs is None:
        return _steps(src, dst, cheapest_way(problem), pend)
    # Seconds may like what bytes never do (a latency saved, a fast axis): all ways are built and priced.
    options = [_steps(src, dst, way, pend) for way in possible_ways(problem)]
    return min(
        options, key=lambda steps: (sum(costs(step, shape, itemsize) for step in steps), _load(steps, shape))
    )


def _to_finish(src: Layout, dst: Layout) -> tuple[tuple[tuple[str, str], ...], set[str]]:
    """Reductions to be done, in order, and pending axes that stay.

    The axis last in the mesh is reduced first. So one that could stay must go, and come back, when
    on another before it something is finished or made pending with another operation.
    """
    if not src.partial:
        return (), set()
    before, wanted = dict(src.partial), dict(dst.partial)
    finish: list[tuple[str, str]] = []
    kept: set[str] = set()
    touched: set[str] = set()
    for axis in src.mesh.names:
        old, new = before.get(axis), wanted.get(axis)
        # A sum of sums may be finished in any order, a maximum of sums may not.
        if old is not None and old == new and touched <= {old}:
            kept.add(axis)
            continue
        touched.update(op for op in (old, new) if op is not None)
        if old is not None:
            finish.append((axis, old))
    return tuple(reversed(finish)), kept


def _steps(src: Layout, dst: Layout, way: Sequence[Way], pend: Sequence[tuple[str, str]]) -> tuple[Step, ...]:
    steps: list[Step] = []
    now = src
    for kind, axes, *rest in way:
        partial = now.partial
        if kind in ("reduce_scatter", "all_reduce"):
            partial = tuple(pair for pair in partial if pair[0] not in axes)
        then = _intern(src.mesh, after(now.dims, (kind, axes, *rest)), partial, src.tier)
        steps.append(Permute(axes, now, then) if kind == "permute" else _KINDS[kind](axes, now, then, *rest))
        now = then
    for op, axes in by_op(pend):
        then = now.replace(partial={**dict(now.partial), **dict.fromkeys(axes, op)})
        steps.append(Pend(tuple(axes), now, then, op))
        now = then
    assert now == dst, f"planned {now} instead of {dst}"
    return tuple(steps)


def _across(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, costs: Costs | None
) -> tuple[Step, ...]:
    # A reduce-scatter where a whole sum would do: what crosses is then cut over all ranks that summed it.
    leave = _spread(src, shape, src.partial_axes) if src.partial else src
    first = find_steps(src, leave, shape, itemsize, costs)
    whole = dst.replace(partial=())
    options = []
    # Landing cut sends each element once and gathers it on the target's own links; landing whole saves the
    # gather.
    for land in dict.fromkeys([whole, _spread(whole, shape, ())]):
        steps = (*first, SendRecv((), leave, land), *find_steps(land, dst, shape, itemsize, costs))
        options.append(steps)
    if costs is not None:
        return min(options, key=lambda steps: sum(costs(step, shape, itemsize) for step in steps))
    return min(options, key=lambda steps: _load(steps, shape))


def _spread(layout: Layout, shape: tuple[int, ...], finished: tuple[str, ...]) -> Layout:
    """The layout cut further over `finished` and all axes along which ranks would hold the same."""
    if not shape:
        return layout.replace(partial=())
    axes = [*layout.free_axes, *finished]
    problem = RouteProblem(Traffic(layout.mesh._sizes, shape), layout.dims, layout.dims)
    dims = list(layout.dims)
    for dim, more in place_axes(problem, dims, axes, []):
        dims[dim] += more
    return make_layout(layout.mesh, dims, {}, layout.tier)


def _load(steps: Sequence[Step], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Elements that a rank receives or, between meshes, sends; all that cross; number of steps."""
    busiest = crossing = 0
    for step in steps:
        if isinstance(step, SendRecv):
            blocks = step.blocks(shape)
            busiest += max(most_received(blocks), most_sent(blocks))
            crossing += sum(b.num_elements for b in blocks if b.src_rank != b.dst_rank)
        else:
            busiest += step.num_elements(shape)
    return busiest, crossing, len(steps)
