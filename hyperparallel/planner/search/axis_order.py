"""Where the axes of a strategy may lie on the fabric: the placements that differ, and their words.

A placement is an order of the axes (innermost first) and a fill (`cluster/axis_links.py`). Of all orders and
fills only those are tried that put some axis elsewhere: axes of one rank count for nothing, and dimensions of
one tier that are equally wide may change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from hyperparallel.cluster.axis_links import FILLS, Fill, Placed
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.planner.cost.rows import axes_placed
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.space import EVERYTHING, Limits, Skeleton
from hyperparallel.planner.strategy import ORDERS, Candidates, Strategy

AxisOrder = tuple[str, Fill]
USUAL: AxisOrder = (ORDERS[0], FILLS[0])
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def axis_orders(
    job: PlanningJob, sizes: Sequence[Skeleton], limits: Limits = EVERYTHING
) -> list[list[AxisOrder]]:
    """The placements of each skeleton that differ, the usual one first where it is allowed."""
    every = [
        (o, f) for o, f in product(ORDERS, FILLS) if limits.allows("order", o) and limits.allows("fill", f)
    ]
    if limits.runnable:
        every = [one for one in every if one == USUAL]
    many = any(sum(n > 1 for n in tier.size) > 1 for tier in job.cluster.fabric)
    if not many:
        every = list({order: (order, fill) for order, fill in reversed(every)}.values())[::-1]
    seen: list[set[bytes]] = [set() for _ in sizes]
    found: list[list[AxisOrder]] = [[] for _ in sizes]
    for one in every:
        for i, key in enumerate(_keys(job.cluster, sizes, one)):
            if key not in seen[i]:
                seen[i].add(key)
                found[i].append(one)
    return found


def _keys(cluster: Cluster, sizes: Sequence[Skeleton], one: AxisOrder) -> list[bytes]:
    """Of each skeleton, what is equal for placements that cannot be told apart."""
    table = np.array(sizes, float).reshape(-1, len(Skeleton._fields))
    columns = {name: table[:, i] for i, name in enumerate(Skeleton._fields)}
    where = axes_placed(cluster, Candidates(**columns, order=one[0], fill=one[1]))
    names = sorted(where)
    # An axis in a dimension as one number, a dimension as one row of them: sorted among its equals.
    pairs = np.stack([_pair(where[name]) for name in names])
    tiers, dims = np.array(cluster.dim_tiers or (0,)), np.array(cluster.dims or (1,))
    for tier, width in {*zip(tiers.tolist(), dims.tolist(), strict=True)}:
        same = np.flatnonzero((tiers == tier) & (dims == width))
        if len(same) > 1:
            ranks = _ranks(pairs[:, same])
            order = np.argsort(ranks, axis=0, kind="stable")
            # Equally wide dimensions of a tier are the same but for their names: sorted, two placements that
            # swap them are one.
            pairs[:, same] = np.take_along_axis(pairs[:, same], order[None], axis=1)
    rows = np.ascontiguousarray(np.moveaxis(pairs, 2, 0))
    return [row.tobytes() for row in rows]


def _pair(one: Placed) -> npt.NDArray[np.int64]:
    """Members and stride of an axis [dims, C] in one number; a stride without members is nothing."""
    strides = np.where(one.members > 1, one.strides, 1)
    return np.asarray(one.members * (1 << 32) + strides, np.int64)


def _ranks(pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[dims, C]: the place of each dimension's column of axes among all columns."""
    axes, dims, count = pairs.shape
    flat = pairs.reshape(axes, dims * count)
    ranks = np.unique(flat, axis=1, return_inverse=True)[1]
    return np.asarray(ranks).reshape(dims, count)


def place_words(job: PlanningJob, s: Strategy, axis: str) -> str:
    """Where an axis lies on the fabric: " (inside nvlink)", " (across infiniband)", " (on the rack's second
    dimension)" or " (on 4 x 4 of the rack)".

    Of axes of one rank, and on machines of one dimension, nothing is said.
    """
    cluster = job.cluster
    named = [i for i, tier in enumerate(cluster.fabric) if tier.num_members > 1]
    wide = [i for i in named if sum(n > 1 for n in cluster.fabric[i].size) > 1]
    if getattr(s, axis) == 1 or len(named) + len(wide) < 2:
        return ""
    members = axes_placed(cluster, Candidates.of([s]))[axis].members[:, 0]
    crossed = [tier for tier, size in zip(cluster.dim_tiers, members, strict=True) if size > 1]
    outermost = max((i for i in named if i in crossed), default=named[0])
    name = cluster.fabric[outermost].name
    if set(crossed) == {outermost} and outermost in wide:
        inside = [int(n) for tier, n in zip(cluster.dim_tiers, members, strict=True) if tier == outermost]
        over = [i for i, n in enumerate(inside) if n > 1]
        if len(over) == 1:
            return f" (on the {name}'s {ORDINALS[over[0]]} dimension)"
        return f" (on {' x '.join(map(str, inside))} of the {name})"
    return f" ({'inside' if outermost != named[-1] else 'across'} {name})"


def moved_axis(job: PlanningJob, s: Strategy, other: Strategy) -> str | None:
    """The first axis that the placements of two strategies of the same sizes put elsewhere."""
    for axis in ("tp", "ep", "cp", "pp", "dp"):
        if getattr(s, axis) > 1 and place_words(job, s, axis) != place_words(job, other, axis):
            return axis
    return None
