"""Local forms of products with a bias, and of convolutions and group norms with local group counts.

With the contracted factor cut every rank computes a summand of the result, and the bias is part of
one summand only: the first piece's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyperparallel.graph.local.local_op import LocalOp, contiguous, only_if

Form = Callable[[LocalOp], tuple[Any, ...]]


def _added(local: LocalOp) -> tuple[Any, ...]:
    """addmm and kin: beta is 0 but on the first piece, which ATen reads as "no bias"."""
    lost = local.lost()
    if not lost:
        return local.call()
    # Not a bias of zeros: times beta 0, ATen does not even look at it (NaN in it would not count).
    beta = local.kwargs.get("beta", 1) if local.first(lost) else 0
    return local.call(kwargs={**local.kwargs, "beta": beta})


def _biased(local: LocalOp) -> tuple[Any, ...]:
    """linear: (input, weight, bias?)"""
    lost = local.lost()
    if not lost or local.argument(2) is None or local.first(lost):
        return local.call()
    return local.call(local.with_argument(2, None))


def _convolution(local: LocalOp) -> tuple[Any, ...]:
    """(input, weight, bias?, stride, padding, dilation, transposed, output_padding, groups)"""
    args = list(local.args)
    lost = local.lost()
    if lost and args[2] is not None:  # on every rank, so that programs stay alike
        args[2] = local.emit(only_if, args[2], local.first(lost))
    args[8] = _groups(local, args[8])
    return local.call_guarded(tuple(args))


def _convolution_backward(local: LocalOp) -> tuple[Any, ...]:
    """(grad, input, weight, bias_sizes?, stride, ..., groups, output_mask)

    The gradient of the bias does not see the input channels: where those are cut it counts once.
    """
    if not local.pieces:
        return local.call()
    args = list(local.args)
    if args[3] is not None:
        # As many as the output channels of the local gradient.
        args[3] = [local.shape(local.rule.inputs[0])[1]]
    # Cut groups are cut channels: the kernel finds as many groups as its channels make.
    args[9] = _groups(local, args[9])
    results = local.call_guarded(tuple(args))
    if results[2] is not None and "c" in local.pieces:
        results = (*results[:2], local.emit(only_if, results[2], local.first("c")))
    return results


def _groups(local: LocalOp, groups: int) -> int:
    return local.size("g") if "g" in local.pieces else groups


def _group_norm(counts_at: int) -> Form:
    """native_group_norm and its backward: N, C, HxW, group stand from `counts_at` on."""

    def form(local: LocalOp) -> tuple[Any, ...]:
        if not local.pieces:
            return local.call()
        args = list(local.args)
        rows, channels = local.shape(local.rule.inputs[0])[:2]
        args[counts_at : counts_at + 2] = rows, channels
        args[counts_at + 3] = _groups(local, args[counts_at + 3])
        # The kernels want contiguous operands; the backward gives wrong results without a word.
        for i in range(4 if counts_at == 5 else 1):
            args[i] = local.emit(contiguous, args[i])
        return local.call_guarded(tuple(args))

    return form


FORMS: dict[str, Form] = {
    "aten.addmm": _added,
    "aten.baddbmm": _added,
    "aten.addmv": _added,
    "aten.linear": _biased,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten.native_group_norm": _group_norm(3),
    "aten.native_group_norm_backward": _group_norm(5),
}
