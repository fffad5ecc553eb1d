"""Which fabric dimensions a parallel axis crosses, for many candidate sizes at once.

Devices are numbered with the innermost fabric dimension fastest, and parallel axes are laid over them
innermost first. Each axis takes from the innermost dimension with room the greatest common divisor of what
it still needs and of what is left there, then from the next. Where every size divides (powers of two on
nodes of 8) that is the usual contiguous placement. Where they don't (tp 6 on nodes of 8), the axis takes 2
inside the node and 3 across, and the axes after it take the 4 that are left inside: a valid placement, in
which every group is alike, while contiguous groups would cross node borders at different places.
A factor that no dimension has (3 on 8 devices) counts at the outermost dimension; the product of all axes
should be the number of devices (`Cluster.resized`, `Cluster.narrowed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hyperparallel.cluster.cluster import Cluster

Counts = npt.NDArray[np.int64]


def spans(cluster: Cluster, sizes: Sequence[npt.ArrayLike]) -> Counts:
    """Group size of every axis within every fabric dimension, per candidate.

    sizes: one entry per axis, innermost first: an int, or an array of C candidates. Returns
    [axes, dims, C] (C = 1 for ints) over `cluster.dims`; `cluster.dim_tiers` says the tier of a dimension.
    The product over dims is the axis' size; an axis crosses exactly the dims with more than 1.

    >>> from hyperparallel.cluster.presets import preset
    >>> spans(preset("h100", 64), [8, 2, 4])[:, :, 0].tolist()  # tp in the node, pp and dp across
    [[8, 1], [1, 2], [1, 4]]
    """
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, dtype=np.int64)) for size in sizes))
    axes = np.stack(arrays) if arrays else np.ones((0, 1), dtype=np.int64)
    dims = cluster.dims or (1,)
    left = np.repeat(np.array(dims, dtype=np.int64)[:, None], axes.shape[1], axis=1)
    result = np.ones((axes.shape[0], len(dims), axes.shape[1]), dtype=np.int64)
    for index, size in enumerate(axes):
        needed = size.copy()
        for dim in range(len(dims)):
            taken = np.gcd(needed, left[dim])
            result[index, dim] = taken
            needed //= taken
            left[dim] //= taken
        result[index, -1] *= needed
    return result


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
