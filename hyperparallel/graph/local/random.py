"""Local forms of random ops: every rank draws the whole tensor and keeps its piece.

All ranks hold the same generator state, so a number depends on its element and not on the mesh, and
a sharded run equals the single-device run bit for bit. The price is drawing, not keeping, the
whole: for a dropout mask one byte per element of the global tensor while the op runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from hyperparallel.graph.local.local_op import LocalOp
from hyperparallel.shard.rules.factories import DRAWN, DRAWN_LIKE

aten = torch.ops.aten
Form = Callable[[LocalOp], tuple[Any, ...]]


def stand_in(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An empty tensor of the global shape, dense, its dims in memory in the order of those of x.

    Kernels draw in memory order, so a transposed operand must stay transposed.
    """
    # Kernels draw into an `empty_like`; where x is expanded (strides of 0), torch alone knows its order.
    strides = torch.empty_like(x).stride()
    order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))
    return x.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(x.ndim)])


def _drawn(local: LocalOp) -> tuple[Any, ...]:
    """rand and kin: sizes in the arguments are global, which is what is wanted."""
    return (local.keep_piece(local.call()[0]),)


def _drawn_like(local: LocalOp) -> tuple[Any, ...]:
    """rand_like, bernoulli.p and kin: the operand gives shape and dtype."""
    if not local.pieces:
        return local.call()
    shape = local.global_shape(local.output_dims())
    whole = local.emit(stand_in, local.args[0], shape)
    return (local.keep_piece(local.call(local.with_argument(0, whole))[0]),)


def _dropout(local: LocalOp) -> tuple[Any, ...]:
    """native_dropout(input, p, train) -> out, mask: the same kernel draws, on a stand-in."""
    x, p, train = local.args
    if not local.pieces:
        return local.call()
    # Nothing is drawn, so nothing has to be drawn for the whole.
    if train is False:
        mask = local.emit(aten.ones_like.default, x, dtype=torch.bool)
        return local.emit(aten.clone.default, x), mask
    whole = local.emit(stand_in, x, local.global_shape(local.output_dims()))
    drawn = local.emit(local.target, whole, p, train)
    mask = local.keep_piece(local.emit(operator.getitem, drawn, 1))
    # As ATen does: everything dropped is 0, not 0 / 0.
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    # grad * mask * scale, which is also what the forward does with its operand.
    return local.emit(aten.native_dropout_backward.default, x, mask, scale), mask


FORMS: dict[str, Form] = {
    **dict.fromkeys(DRAWN, _drawn),
    **dict.fromkeys(DRAWN_LIKE, _drawn_like),
    "aten.native_dropout": _dropout,
}
