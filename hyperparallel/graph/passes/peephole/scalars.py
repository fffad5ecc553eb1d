"""Local rewrites of arithmetic with numbers: a number is a tensor made once, by setup.

PyTorch wraps a Python number into a tensor at every call, which costs more than a small kernel. A
tensor without dims and of the other operand's dtype is the same operand: it takes no part in
promotion. Only float32 and float64, where the number is rounded the same way either way, and division
only by powers of two, where multiplying by the reciprocal is exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    Call,
    Rewriter,
    RewriteTable,
    aten,
    calls,
    dtype,
    only_here,
    same_dtype,
    same_value_shape,
)

_EXACT = (torch.float32, torch.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_scaling(node: Any) -> bool:
    """Whether a node is tensor * number, in one floating dtype."""
    if not calls(node, aten.mul.Tensor, aten.mul.Scalar) or node.kwargs:
        return False
    return _is_number(node.args[1]) and same_dtype(node, node.args[0])


def _number_to_tensor(node: Call, edit: Rewriter) -> fx.Node | None:
    """x + 0.5 -> x + c, x * 0.5 -> x * c, with c a constant tensor"""
    x, number = node.args[0], node.args[1] if len(node.args) > 1 else None
    kind = dtype(node)
    if kind not in _EXACT or not same_dtype(node, x) or not _is_number(number) or node.kwargs:
        return None
    if len(node.args) != 2 or node.meta["constant"]:
        return None
    assert isinstance(number, (int, float)) and kind is not None
    return edit.call(node, _TENSOR_FORM[node.target], x, edit.scalar(number, kind))


_TENSOR_FORM: dict[Any, Any] = {
    aten.mul.Tensor: aten.mul.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.add.Tensor: aten.add.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}


def _divided_by_power(node: Call, edit: Rewriter) -> fx.Node | None:
    """x / 2**k -> x * 2**-k"""
    x, number = node.args[:2]
    if not _is_number(number) or not same_dtype(node, x) or node.kwargs:
        return None
    assert isinstance(number, (int, float))
    if math.frexp(abs(number))[0] != 0.5 or abs(math.log2(abs(number))) > 14:
        return None
    return edit.call(node, aten.mul.Scalar, x, 1.0 / number)


def _one_scaling(node: Call, edit: Rewriter) -> fx.Node | None:
    """(x * a) * b -> x * (a * b)"""
    inner = node.args[0]
    if not _is_scaling(node) or not _is_scaling(inner) or not only_here(inner):
        return None
    return edit.call(node, aten.mul.Scalar, inner.args[0], inner.args[1] * node.args[1])


def _scale_smaller(node: Call, edit: Rewriter) -> fx.Node | None:
    """x * (y * a) -> (x * a) * y where x is broadcast to y, so that fewer elements are scaled"""
    if node.kwargs or len(node.args) != 2:
        return None
    for x, scaled in (node.args, node.args[::-1]):
        if not _is_scaling(scaled) or not only_here(scaled) or not isinstance(x, fx.Node):
            continue
        if same_value_shape(x, scaled) or not same_value_shape(scaled, node):
            continue
        if same_dtype(x, scaled):
            small = edit.call(node, aten.mul.Scalar, x, scaled.args[1], like=x)
            return edit.call(node, aten.mul.Tensor, small, scaled.args[0])
    return None


NUMBERS: RewriteTable = {
    aten.div.Tensor: (_divided_by_power,),
    aten.div.Scalar: (_divided_by_power,),
    aten.mul.Tensor: (_one_scaling, _scale_smaller),
    aten.mul.Scalar: (_one_scaling,),
}
CONSTANT_NUMBERS: RewriteTable = dict.fromkeys(_TENSOR_FORM, (_number_to_tensor,))
