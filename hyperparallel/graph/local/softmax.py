"""Local forms of softmax and log-softmax along a cut dim, forward and backward.

Forward: the maximum of each row is reduced, then the sum of exp(x - max); backward: one sum per
row. So logits over a cut vocabulary are never gathered. Half precision is computed in float32, as
in ATen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperparallel.graph.local.local_op import LocalOp
from hyperparallel.graph.local.reduction import extreme, finite, wide

Form = Callable[[LocalOp], tuple[Any, ...]]


def row_maximum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The maximum along `dim`, kept; -inf where the piece is empty."""
    return extreme(wide(x), [dim], True, True)


def row_sum(x: torch.Tensor, top: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of exp(x - top) along `dim`, kept."""
    # In place: x - top is new.
    return (wide(x) - top).exp_().sum(dim, keepdim=True)


def log_softmax_piece(
    x: torch.Tensor, top: torch.Tensor, total: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """x - log-sum-exp of its row."""
    return (wide(x) - (top + total.log())).to(x.dtype if dtype is None else dtype)


def softmax_piece(
    x: torch.Tensor, top: torch.Tensor, total: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """exp(x) over the sum of its row."""
    return ((wide(x) - top).exp_() / total).to(x.dtype if dtype is None else dtype)


def safe_softmax_piece(
    x: torch.Tensor, top: torch.Tensor, total: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """The same, but 0 in a row that is -inf throughout."""
    return softmax_piece(x, top, torch.where(total == 0, 1.0, total), dtype)


def log_softmax_grad(
    grad: torch.Tensor, out: torch.Tensor, total: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """grad - softmax * (sum of grad along the row)."""
    # In place on what exp has made; `grad` and `out` are not written to.
    return wide(out).exp().mul_(-total).add_(wide(grad)).to(dtype)


def softmax_grad(
    grad: torch.Tensor, out: torch.Tensor, total: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """softmax * (grad - sum of grad * softmax along the row)."""
    return (wide(out) * (wide(grad) - total)).to(dtype)


def grad_sum(grad: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of grad along `dim`, kept."""
    return wide(grad).sum(dim, keepdim=True)


def product_sum(grad: torch.Tensor, out: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of grad * out along `dim`, kept."""
    return (wide(grad) * wide(out)).sum(dim, keepdim=True)


def _cut_factor(local: LocalOp, dim: int) -> str | None:
    """The factor of the softmax dim, if it is cut."""
    factors = local.rule.inputs[0][dim] if local.rule.inputs[0] else ()
    return next((factor for factor in factors if factor in local.pieces), None)


def _forward(piece: Callable[..., torch.Tensor], safe: bool = False) -> Form:
    def form(local: LocalOp) -> tuple[Any, ...]:
        x, dim = local.args[0], local.argument(1, "dim")
        factor = _cut_factor(local, dim)
        if factor is None:
            return local.call()
        dtype = local.argument(2, "dtype") if safe else None
        if not safe and local.argument(2, "half_to_float", False):
            dtype = torch.float32
        top = local.reduce(local.emit(row_maximum, x, dim), "max", factor)
        if safe:
            # A row of -inf throughout: -inf - -inf is NaN, -inf - 0 stays -inf, and its exp is 0.
            top = local.emit(finite, top)
        total = local.reduce(local.emit(row_sum, x, top, dim), "sum", factor)
        return (local.emit(piece, x, top, total, dtype),)

    return form


def _log_softmax_backward(local: LocalOp) -> tuple[Any, ...]:
    """_log_softmax_backward_data(grad, output, dim, input_dtype)"""
    grad, out, dim, dtype = local.args
    factor = _cut_factor(local, dim)
    if factor is None:
        return local.call()
    total = local.reduce(local.emit(grad_sum, grad, dim), "sum", factor)
    return (local.emit(log_softmax_grad, grad, out, total, dtype),)


def _softmax_backward(local: LocalOp) -> tuple[Any, ...]:
    """_softmax_backward_data(grad, output, dim, input_dtype)"""
    grad, out, dim, dtype = local.args
    factor = _cut_factor(local, dim)
    if factor is None:
        return local.call()
    total = local.reduce(local.emit(product_sum, grad, out, dim), "sum", factor)
    return (local.emit(softmax_grad, grad, out, total, dtype),)


FORMS: dict[str, Form] = {
    "aten._log_softmax": _forward(log_softmax_piece),
    "aten._softmax": _forward(softmax_piece),
    "aten._safe_softmax": _forward(safe_softmax_piece, safe=True),
    "aten._log_softmax_backward_data": _log_softmax_backward,
    "aten._softmax_backward_data": _softmax_backward,
}
