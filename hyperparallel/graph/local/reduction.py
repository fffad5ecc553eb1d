"""Local forms of reductions over a cut dim.

A mean is a pending sum of local means, each weighted by its share of the elements. A maximum starts
from the lowest number, so that an empty piece does not count. Variance, norms and log-sum-exp
exchange their sums and are replicated; sums of 16-bit floats are kept and exchanged in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hyperparallel.graph.local.local_op import LocalOp

Form = Callable[[LocalOp], tuple[Any, ...]]


def wide(x: torch.Tensor) -> torch.Tensor:
    """x, in float32 if it has 16 bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def like(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A result in the dtype of x, if that is a 16-bit float."""
    return result.to(x.dtype) if x.dtype in (torch.float16, torch.bfloat16) else result


def mean_share(
    x: torch.Tensor, dims: list[int], keep: bool, dtype: torch.dtype | None, share: float
) -> torch.Tensor:
    """The mean of a piece times its share of all elements; an empty piece adds nothing."""
    # The mean of nothing is NaN, and NaN * 0 is NaN.
    if share == 0:
        return x.sum(dims, keepdim=keep, dtype=dtype)
    return x.mean(dims, keepdim=keep, dtype=dtype) * share


def extreme(x: torch.Tensor, dims: list[int], keep: bool, largest: bool) -> torch.Tensor:
    """amax or amin; of no elements, the number that loses against every other."""
    if any(x.shape[d] == 0 for d in dims):
        if x.dtype == torch.bool:
            neutral: float = not largest
        elif x.dtype.is_floating_point:
            neutral = -math.inf if largest else math.inf
        else:
            # Integers have no infinity.
            info = torch.iinfo(x.dtype)
            neutral = info.min if largest else info.max
        gone = {d % x.ndim for d in dims}
        shape = [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]
        return x.new_full(shape, neutral)
    return x.amax(dims, keepdim=keep) if largest else x.amin(dims, keepdim=keep)


def mean_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """A sum over the number of summands."""
    return total / count


def squares(x: torch.Tensor, mean: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The sum of squared deviations from a mean of the same rank."""
    return (x - mean).square().sum(dims, keepdim=True)


def variance(total: torch.Tensor, freedom: float, root: bool) -> torch.Tensor:
    """Variance (or its root) from a sum of squares and the degrees of freedom."""
    # No degree of freedom: a division by zero, which gives inf or NaN as ATen does.
    variance = total / max(freedom, 0.0)
    return variance.sqrt() if root else variance


def powers(x: torch.Tensor, order: float, dims: list[int], keep: bool) -> torch.Tensor:
    """The sum of |x|^order (how many are not zero, for order 0)."""
    # pow(0) would count zeros too (0 ** 0 is 1).
    size = (x != 0).to(x.dtype) if order == 0 else x.abs() if order == 1 else x.abs().pow(order)
    return size.sum(dims, keepdim=keep)


def root_of(total: torch.Tensor, order: float) -> torch.Tensor:
    """A norm from its sum of powers."""
    return total if order in (0, 1) else total.pow(1.0 / order)


def exponentials(x: torch.Tensor, top: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The sum of exp(x - top)."""
    return (x - finite(top)).exp().sum(dims, keepdim=True)


def logarithm(total: torch.Tensor, top: torch.Tensor, dims: list[int], keep: bool) -> torch.Tensor:
    """log-sum-exp from the sum of exp(x - top)."""
    result = total.log() + finite(top)
    return result if keep else result.squeeze(tuple(dims))


def finite(top: torch.Tensor) -> torch.Tensor:
    """A maximum that may be subtracted: 0 in place of an infinity."""
    return torch.where(top.abs() == math.inf, 0.0, top)


def _dims(local: LocalOp, position: int | None) -> list[int]:
    """The reduced dims, counted from the front; all, if none is named."""
    ndim = len(local.rule.inputs[0])
    # An empty list of dims means all of them, in ATen.
    dims = None if position is None else local.argument(position, "dim")
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return list(range(ndim))
    return [dims % ndim] if isinstance(dims, int) else [d % ndim for d in dims]


def _counts(local: LocalOp, dims: list[int]) -> tuple[int, int]:
    """How many elements go into one result, on this rank and in all."""
    before = local.rule.inputs[0]
    shapes = local.shape(before), local.global_shape(before)
    here, everywhere = (math.prod(shape[d] for d in dims) for shape in shapes)
    return here, everywhere


def _mean(dims_at: int | None, keep_at: int) -> Form:
    def form(local: LocalOp) -> tuple[Any, ...]:
        if not local.lost():
            return local.call()
        dims = _dims(local, dims_at)
        here, everywhere = _counts(local, dims)
        keep = dims_at is not None and bool(local.argument(keep_at, "keepdim", False))
        dtype = local.kwargs.get("dtype")
        return (local.emit(mean_share, local.args[0], dims, keep, dtype, here / max(everywhere, 1)),)

    return form


def _extreme(dims_at: int | None, largest: bool) -> Form:
    def form(local: LocalOp) -> tuple[Any, ...]:
        if not local.lost():
            return local.call()
        keep = dims_at is not None and bool(local.argument(2, "keepdim", False))
        return (local.emit(extreme, local.args[0], _dims(local, dims_at), keep, largest),)

    return form


def _variance(dims_at: int | None, corrected: bool, root: bool) -> Form:
    """var, std, var_mean; `corrected` where the correction is a keyword, not `unbiased`."""

    def form(local: LocalOp) -> tuple[Any, ...]:
        lost = local.lost()
        if not lost:
            return local.call()
        dims = _dims(local, dims_at)
        if corrected:
            given = local.kwargs.get("correction")
            correction = 1.0 if given is None else float(given)
            keep = bool(local.kwargs.get("keepdim", False))
        else:
            at = 1 if dims_at is None else 2
            correction = float(local.argument(at, "unbiased", True))
            keep = dims_at is not None and bool(local.argument(3, "keepdim", False))
        # Degrees of freedom are of the whole: the correction is subtracted once, not once a rank.
        _, count = _counts(local, dims)
        x = local.emit(wide, local.args[0])
        sums = local.emit(torch.ops.aten.sum.dim_IntList, x, dims, True)
        # Two exchanges: squares are taken around the mean of all (E[x^2] - E[x]^2 would cancel).
        mean = local.emit(mean_of, local.reduce_over(sums, "sum", lost), count)
        total = local.reduce_over(local.emit(squares, x, mean, dims), "sum", lost)
        results = [local.emit(variance, total, count - correction, root), mean][: len(local.op.outputs)]
        results = [local.emit(like, r, local.args[0]) for r in results]
        shape = list(local.output_shape())
        if not keep:
            results = [local.emit(torch.ops.aten.reshape.default, r, shape) for r in results]
        return tuple(results)

    return form


def _norm(order_at: int, dims_at: int | None) -> Form:
    def form(local: LocalOp) -> tuple[Any, ...]:
        lost = local.lost()
        if not lost:
            return local.call()
        given = local.argument(order_at, "ord")
        order = 2.0 if given is None else float(given)
        keep = dims_at is not None and bool(local.argument(dims_at + 1, "keepdim", False))
        dims, x = _dims(local, dims_at), local.args[0]
        if local.kwargs.get("dtype") is not None:
            x = local.emit(torch.ops.aten._to_copy.default, x, dtype=local.kwargs["dtype"])
        # The largest of largest ones: a maximum, no sum of powers.
        if math.isinf(order):
            largest = order > 0
            top = local.emit(extreme, local.emit(torch.ops.aten.abs.default, x), dims, keep, largest)
            return (local.reduce_over(top, "max" if largest else "min", lost),)
        powered = local.emit(powers, local.emit(wide, x), order, dims, keep)
        total = local.reduce_over(powered, "sum", lost)
        return (local.emit(like, local.emit(root_of, total, order), x),)

    return form


def _log_sum_exp(local: LocalOp) -> tuple[Any, ...]:
    lost = local.lost()
    if not lost:
        return local.call()
    dims, x = _dims(local, 1), local.emit(wide, local.args[0])
    keep = bool(local.argument(2, "keepdim", False))
    # exp(x - top) cannot overflow; every rank must subtract the same top for the sums to add up.
    top = local.reduce_over(local.emit(extreme, x, dims, True, True), "max", lost)
    total = local.reduce_over(local.emit(exponentials, x, top, dims), "sum", lost)
    return (local.emit(like, local.emit(logarithm, total, top, dims, keep), local.args[0]),)


FORMS: dict[str, Form] = {
    "aten.mean.default": _mean(None, 2),
    "aten.mean.dim": _mean(1, 2),
    "aten.amax": _extreme(1, True),
    "aten.amin": _extreme(1, False),
    "aten.max.default": _extreme(None, True),
    "aten.min.default": _extreme(None, False),
    "aten.var.default": _variance(None, False, False),
    "aten.var.dim": _variance(1, False, False),
    "aten.var.correction": _variance(1, True, False),
    "aten.var_mean.default": _variance(None, False, False),
    "aten.var_mean.dim": _variance(1, False, False),
    "aten.var_mean.correction": _variance(1, True, False),
    "aten.std.default": _variance(None, False, True),
    "aten.std.dim": _variance(1, False, True),
    "aten.std.correction": _variance(1, True, True),
    "aten.linalg_vector_norm": _norm(1, 2),
    "aten.norm.Scalar": _norm(1, None),
    "aten.norm.ScalarOpt_dim": _norm(1, 2),
    "aten.logsumexp": _log_sum_exp,
}
