"""Local forms of losses: cross-entropy over cut rows and classes, means over a cut batch.

Each rank scores the rows it holds whose target falls in its piece of the classes. Sums of losses
and of weights travel in one exchange, so a mean is divided by the weight of the whole batch.
Targets are global class numbers; `ignore_index` and class weights are honoured. An all-ignored
batch gives NaN, as in ATen.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from hyperparallel.graph.local.local_op import LocalOp
from hyperparallel.graph.local.reduction import like, wide
from hyperparallel.shard.rules.loss import MEAN, NONE, SUM

Form = Callable[[LocalOp], tuple[Any, ...]]


def _targets(
    target: torch.Tensor, classes: int, offset: int, ignore: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets fall in this piece, and their numbers within it (0 for the others)."""
    here = target - offset
    valid = (target != ignore) & (here >= 0) & (here < classes)
    return valid, torch.where(valid, here, 0)


def nll_rows(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    offset: int,
    ignore: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and weight of each row whose target falls in this piece of the classes, else 0."""
    dim = 1 if scores.ndim > 1 else 0
    if scores.shape[dim] == 0:
        nothing = scores.new_zeros(target.shape)
        return nothing, nothing
    valid, index = _targets(target, scores.shape[dim], offset, ignore)
    weights = torch.ones_like(index, dtype=scores.dtype) if weight is None else weight[index]
    # Summed over ranks, each row counts once: its target is valid in one piece of the classes.
    weights = torch.where(valid, weights, 0.0)
    picked = scores.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    return torch.where(valid, -picked * weights, 0.0), weights


def nll_losses(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    offset: int,
    ignore: int,
) -> torch.Tensor:
    """The loss of each row, 0 where its target falls in another piece; of 16-bit ones, in float32."""
    return nll_rows(wide(scores), target, None if weight is None else wide(weight), offset, ignore)[0]


def nll_sums(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    offset: int,
    ignore: int,
) -> torch.Tensor:
    """[sum of losses, sum of weights] over rows whose target falls in this piece; of 16-bit ones, float32."""
    losses, weights = nll_rows(wide(scores), target, None if weight is None else wide(weight), offset, ignore)
    return torch.stack([losses.sum(), weights.sum()])


def nll_mean(sums: torch.Tensor) -> torch.Tensor:
    """Sum of losses over sum of weights."""
    return sums[0] / sums[1]


def nll_grad(
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore: int,
    total: torch.Tensor,
    offset: int,
) -> torch.Tensor:
    """The gradient of the scores in this piece of the classes."""
    result = torch.zeros_like(scores)
    dim = 1 if scores.ndim > 1 else 0
    if scores.shape[dim] == 0:
        return result
    valid, index = _targets(target, scores.shape[dim], offset, ignore)
    # The weight of the whole batch: the forward handed it over, reduced.
    value = -grad / total if reduction == MEAN else -grad
    value = value.expand(target.shape) if weight is None else value * weight[index]
    value = torch.where(valid, value, 0.0).to(scores.dtype)
    return result.scatter_(dim, index.unsqueeze(dim), value.unsqueeze(dim))


def _nll(local: LocalOp) -> tuple[Any, ...]:
    """nll_loss_forward(self, target, weight?, reduction, ignore_index) -> loss, total weight"""
    scores, target, weight, reduction, ignore = local.args
    if not local.pieces or (reduction == NONE and "c" not in local.pieces):
        return local.call()
    every = (scores, target, weight, local.offset("c"), ignore)
    if reduction == NONE:
        found = local.reduce_over(local.emit(nll_losses, *every), "sum", ("c",))
        losses = local.emit(like, found, scores)
        # ATen gives a total of 0 where nothing is reduced.
        total = local.emit(torch.ops.aten.new_zeros.default, scores, [])
    else:
        # Both sums as one tensor, one message: at this size only latency counts.
        sums = local.reduce_over(local.emit(nll_sums, *every), "sum", local.pieces, parts=2)
        select = torch.ops.aten.select.int
        total = local.emit(select, sums, 0, 1)
        mean = reduction == MEAN
        losses = local.emit(nll_mean, sums) if mean else local.emit(select, sums, 0, 0)
        losses, total = (local.emit(like, x, scores) for x in (losses, total))
    return (losses, total)[: len(local.op.outputs)]


def _nll_backward(local: LocalOp) -> tuple[Any, ...]:
    """nll_loss_backward(grad, self, target, weight?, reduction, ignore_index, total_weight)"""
    if not local.pieces:
        return local.call()
    return (local.emit(nll_grad, *local.args, local.offset("c")),)


def _mean(reduction_at: int) -> Form:
    """A pointwise loss: the mean over a cut batch is a sum over the global number of elements."""

    def form(local: LocalOp) -> tuple[Any, ...]:
        if not local.pieces or local.argument(reduction_at, "reduction", MEAN) != MEAN:
            return local.call()
        at = 1 if "backward" in local.op.target else 0
        # A mean of local means would weigh uneven pieces alike.
        count = prod(local.global_shape(local.rule.inputs[at]))
        (total,) = local.call(local.with_argument(reduction_at, SUM), _no_reduction(local))
        return (local.emit(torch.ops.aten.div.Scalar, total, count),)

    return form


def _no_reduction(local: LocalOp) -> dict[str, Any]:
    return {key: value for key, value in local.kwargs.items() if key != "reduction"}


FORMS: dict[str, Form] = {
    "aten.nll_loss_forward": _nll,
    "aten.nll_loss2d_forward": _nll,
    "aten.nll_loss_backward": _nll_backward,
    "aten.nll_loss2d_backward": _nll_backward,
    "aten.mse_loss": _mean(2),
    "aten.smooth_l1_loss": _mean(2),
    "aten.huber_loss": _mean(2),
    "aten.soft_margin_loss": _mean(2),
    "aten.mse_loss_backward": _mean(3),
    "aten.smooth_l1_loss_backward": _mean(3),
    "aten.huber_loss_backward": _mean(3),
    "aten.soft_margin_loss_backward": _mean(3),
}
