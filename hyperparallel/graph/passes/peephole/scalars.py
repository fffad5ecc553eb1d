"""The local rewrite of arithmetic with numbers: a number is a tensor made once, by setup.

PyTorch wraps a Python number into a tensor at every call, which costs more than a small kernel. A
tensor without dims and of the other operand's dtype is the same operand: it takes no part in
promotion, and CUDA kernels read it on the host as they read a number. Only float32 and float64, where the
number is rounded the same way either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    Call,
    Rewrite,
    Rewriter,
    RewriteTable,
    aten,
    dtype,
    same_dtype,
)

_EXACT = (torch.float32, torch.float64)
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number_to_tensor(node: Call, edit: Rewriter) -> fx.Node | None:
    x, number = node.args[0], node.args[1] if len(node.args) > 1 else None
    kind = dtype(node)
    # A 16-bit op computes with the number in float32; as a tensor of 16 bits it would be rounded first.
    if kind not in _EXACT or not same_dtype(node, x) or not _is_number(number) or node.kwargs:
        return None
    if len(node.args) != 2 or node.meta["constant"]:
        return None
    assert isinstance(number, (int, float)) and kind is not None
    return edit.call(node, _TENSOR_FORM[node.target], x, edit.scalar(number, kind))


def _square(node: Call, edit: Rewriter) -> fx.Node | None:
    x, exponent = node.args
    if exponent != 2 or not same_dtype(x, node):
        return None
    return edit.call(node, aten.mul.Tensor, x, x)


SCALARS: RewriteTable = {
    **dict.fromkeys(_TENSOR_FORM, (Rewrite("x * 0.5 -> x * c, c a tensor made once", _number_to_tensor),)),
    aten.pow.Tensor_Scalar: (Rewrite("x ** 2 -> x * x", _square),),
}
