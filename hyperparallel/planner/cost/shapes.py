"""The distinct layer shapes among many strategies, so that each is described and priced once.

What a layer does on a rank depends on how its own work is cut, not on the pipeline's depth, the schedule or
ZeRO; a search over fifty thousand strategies holds a few thousand shapes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyperparallel.planner.cost.work import Array
from hyperparallel.planner.strategy import ORDERS, Candidates, runs_beside_others

Places = npt.NDArray[np.int64]

_OUTERMOST = [code for code, order in enumerate(ORDERS) if order.endswith("dp-pp")]
"""Orders in which packed tp, cp and experts are placed whatever the sizes of dp and pp are."""


def distinct(c: Candidates) -> tuple[Places, Places]:
    """(position of the first strategy of each shape, the shape of each strategy).

    A shape is made of everything that `layer.py`, the head, and the prices of a segment read. Where the
    pipeline is not outermost or axes are not packed, the sizes of pp and dp decide which links others use.
    """
    # Otherwise pp and dp come last, and take what links the others left.
    inside = ~np.isin(c.order, _OUTERMOST) | (c.fill > 0)
    columns = [c.tp, c.cp, c.ep, c.etp, c.microbatch, c.sp, c.recompute, c.dtype, c.flash, c.overlap, c.graph]
    columns += [c.attention, c.experts, c.dispatcher, c.overlap_experts, c.parts, c.reentrant]
    beside = runs_beside_others(c.pp, c.virtual, c.schedule)
    columns += [c.fused_loss, beside, c.order, c.fill, inside * c.pp, inside * c.dp]
    key = np.zeros(len(c), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + np.asarray(column, np.int64)
        if key.max(initial=0) > 2**40:  # number them anew before the next column could overflow
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)
    _, first, shape = np.unique(key, return_index=True, return_inverse=True)
    return first.astype(np.int64), shape.astype(np.int64)


def spread(value: Array | float, count: int) -> Array:
    """A number or an array as an array of `count`."""
    return np.broadcast_to(np.asarray(value, float), (count,))
