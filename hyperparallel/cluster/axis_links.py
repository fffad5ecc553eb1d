"""Which fabric dimensions a parallel axis crosses, for many candidate sizes at once.

Axes are laid over the dimensions of the fabric innermost first. Each axis takes factors of what is left: from
the innermost tier with room as much as it can, then from the next. Within a tier of several dimensions (a
mesh, a torus) `fill` says from which:

    packed   the first dimension with room, then the next: contiguous device numbers
    apart    dimensions that no axis has used yet first: an axis has links of its own
    square   a prime factor from each in turn: the axis is as wide in every dimension

Where every size divides (powers of two on nodes of 8) packed is the usual contiguous placement. Where they
don't (tp 6 on nodes of 8), the axis takes 2 inside the node and 3 across, and the axes after it take the 4
that are left inside: a valid placement, in which every group is alike, while contiguous groups would cross
node borders at different places. A factor that no dimension has (3 on 8 devices) counts at the outermost
dimension; the product of all axes should be the number of devices (`Cluster.resized`, `Cluster.narrowed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from hyperparallel.cluster.cluster import Cluster

Counts = npt.NDArray[np.int64]
Fill = Literal["packed", "apart", "square"]
FILLS: tuple[Fill, ...] = ("packed", "apart", "square")


@dataclass(frozen=True)
class Placed:
    """Axes on dimensions, each [axes, dims, C]. members: group size of an axis within a dimension. strides:
    distance of neighbours of the axis there, in units of the dimension."""

    members: Counts
    strides: Counts


def spans(cluster: Cluster, sizes: Sequence[npt.ArrayLike], fill: Fill = "packed") -> Counts:
    """Group size of every axis within every fabric dimension, per candidate.

    sizes: one entry per axis, innermost first: an int, or an array of C candidates. Returns
    [axes, dims, C] (C = 1 for ints) over `cluster.dims`; `cluster.dim_tiers` says the tier of a dimension.
    The product over dims is the axis' size; an axis crosses exactly the dims with more than 1.

    >>> from hyperparallel.cluster.presets import preset
    >>> spans(preset("h100", 64), [8, 2, 4])[:, :, 0].tolist()  # tp in the node, pp and dp across
    [[8, 1], [1, 2], [1, 4]]
    """
    return placed(cluster, sizes, fill).members


def placed(
    cluster: Cluster,
    sizes: Sequence[npt.ArrayLike],
    fill: Fill = "packed",
    room: Counts | None = None,
) -> Placed:
    """Members and strides of every axis; room: what is left of each dimension for these axes [dims, C].

    >>> from hyperparallel.cluster.presets import preset
    >>> rack = preset("ub-mesh-1024", 64)
    >>> for fill in FILLS:  # tp 4, then cp 8, on a rack of 8 x 8
    ...     print(fill, placed(rack, [4, 8], fill).members[:, :2, 0].tolist())
    packed [[4, 1], [2, 4]]
    apart [[4, 1], [1, 8]]
    square [[2, 2], [4, 2]]
    """
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, dtype=np.int64)) for size in sizes))
    axes = np.stack(arrays) if arrays else np.ones((0, 1), dtype=np.int64)
    dims = cluster.dims or (1,)
    whole = (
        np.repeat(np.array(dims, dtype=np.int64)[:, None], axes.shape[1], axis=1) if room is None else room
    )
    left = whole.copy()
    members = np.ones((axes.shape[0], len(dims), axes.shape[1]), dtype=np.int64)
    strides = members.copy()
    tiers = [list(run) for _, run in groupby(range(len(dims)), lambda d: (cluster.dim_tiers or (0,))[d])]
    for index, size in enumerate(axes):
        # What axes inside took of a dimension stands between neighbours of this one.
        strides[index] = whole // left
        needed = size.copy()
        for tier in tiers:
            if len(tier) > 1 and fill == "square":
                needed = _spread(needed, tier, left, members[index])
                continue
            if len(tier) > 1 and fill == "apart":
                for dim in tier:
                    # A dimension whose links no axis uses yet.
                    fresh = left[dim] == whole[dim]
                    needed = _take(needed, dim, left, members[index], fresh)
            for dim in tier:
                needed = _take(needed, dim, left, members[index])
        # A factor that no dimension has: counted as a group across the outermost one, which is dear and
        # valid.
        members[index, -1] *= needed
    return Placed(members, strides)


def _take(
    needed: Counts, dim: int, left: Counts, members: Counts, where: npt.NDArray[np.bool_] | None = None
) -> Counts:
    """As much as there is of one dimension, of those candidates; returns what is needed still."""
    # A common divisor, not the minimum: groups are alike only where sizes divide.
    taken = np.gcd(needed, left[dim])
    if where is not None:
        taken = np.where(where, taken, 1)
    members[dim] *= taken
    left[dim] //= taken
    return np.asarray(needed // taken)


def _spread(needed: Counts, tier: Sequence[int], left: Counts, members: Counts) -> Counts:
    """Prime factors from the dimensions of a tier in turn, as long as there are any."""
    before = None
    while before is None or (before != needed).any():
        before = needed
        for dim in tier:
            factor = _smallest_prime(np.gcd(needed, left[dim]))
            members[dim] *= factor
            left[dim] //= factor
            needed = needed // factor
    return needed


def _smallest_prime(numbers: Counts) -> Counts:
    """The smallest prime factor of each; 1 of 1."""
    result = numbers.copy()
    for factor in range(2, int(numbers.max(initial=1) ** 0.5) + 1):
        result = np.where((numbers % factor == 0) & (result > factor), factor, result)
    return np.asarray(result)


def tier_spans(cluster: Cluster, sizes: Sequence[npt.ArrayLike]) -> Counts:
    """Like `spans`, with the dimensions of one fabric tier multiplied together: [axes, tiers, C].

    >>> from hyperparallel.cluster.presets import preset
    >>> tier_spans(preset("h100", 64), [16, 4])[:, :, 0].tolist()
    [[8, 2], [1, 4]]
    """
    by_dim = spans(cluster, sizes)
    tiers = np.array(cluster.dim_tiers or (0,))
    num_tiers = max(1, len(cluster.fabric))
    return np.stack([by_dim[:, tiers == tier].prod(axis=1) for tier in range(num_tiers)], axis=1)


def crossed_bytes_s(cluster: Cluster, axes: Mapping[str, int]) -> dict[str, float]:
    """Bytes per second and device of the slowest fabric tier that each axis (innermost first) crosses."""
    if not cluster.fabric or not axes:
        return {}
    rates = np.array([link.bytes_s / link.oversubscription for link in cluster.fabric])
    crossed = tier_spans(cluster, list(axes.values()))[:, :, 0] > 1
    slowest = np.where(crossed, rates, np.inf).min(axis=1)
    return {axis: float(rate) for axis, rate in zip(axes, slowest, strict=True) if np.isfinite(rate)}
