"""Local rewrites of sums: a sum whose summands a kernel can make in place is one call.

They change rounding: a kernel that multiplies and adds rounds once where two calls round twice. So they
are left out where the plan says `exact`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    RESHAPES,
    Call,
    Rewrite,
    Rewriter,
    RewriteTable,
    aten,
    calls,
    dtype,
    is_product,
    is_sum,
    only_here,
    same_dtype,
    same_value_shape,
    whole_shape,
)

_MATRIX = (aten.mm.default, aten.addmm.default)


def _products(node: Call, edit: Rewriter) -> fx.Node | None:
    """The views are alike or absent; the first product may itself be an addmm."""
    if not is_sum(node):
        return None
    base, added = (_matrix(term) for term in node.args)
    if base is None or added is None or not same_value_shape(base, added):
        return None
    if not same_value_shape(*node.args):
        return None
    if added.target is not aten.mm.default:
        base, added = added, base
    if added.target is not aten.mm.default:
        return None
    total = edit.call(node, aten.addmm.default, base, *added.args, like=base)
    first = node.args[0]
    assert isinstance(first, fx.Node)
    # Sums of matrices as they are; else both were viewed alike, and the sum is viewed so.
    if first in (base, added):
        return total
    return edit.call(node, aten.reshape.default, total, first.args[1])


def _matrix(term: Any) -> fx.Node | None:
    """The matrix product that a term of a sum is, perhaps viewed, if nothing else needs it."""
    if calls(term, *RESHAPES) and only_here(term):
        term = term.args[0]
    alone = calls(term, *_MATRIX) and only_here(term) and not term.kwargs
    return term if alone else None


def _multiply_add(node: Call, edit: Rewriter) -> fx.Node | None:
    if not is_sum(node):
        return None
    for a, product in (node.args, node.args[::-1]):
        if is_product(product) and only_here(product) and _is_tensor(product):
            return edit.call(node, aten.addcmul.default, a, *product.args)
    return None


def _is_tensor(product: fx.Node) -> bool:
    """Whether both factors have dims: a number held as a tensor is quicker to multiply with."""
    return all(whole_shape(factor) for factor in product.args)


def _mean_and_number(node: Call, edit: Rewriter) -> fx.Node | None:
    mean, number = node.args[0], node.args[1]
    if not calls(mean, aten.mean.dim) or not only_here(mean) or mean.kwargs or node.kwargs:
        return None
    kind, dims = dtype(mean), mean.args[1] if len(mean.args) > 1 else None
    if isinstance(number, fx.Node) or not dims or not same_dtype(mean, mean.args[0]):
        return None
    # A mean over a cut dim is pending, and its local form no `mean` of these sizes.
    count = _uncut_elements(mean.args[0], dims)
    if not count or kind is None:
        return None
    total = edit.call(node, aten.sum.dim_IntList, *mean.args, like=mean)
    number = edit.scalar(number, kind)
    return edit.call(node, aten.add.Tensor, number, total, alpha=1.0 / count)


def _uncut_elements(node: Any, dims: Any) -> int:
    """How many elements these dims hold, 0 where a rank holds only some of them."""
    spec = node.meta.get("spec")
    if spec is None or any(axes for dim in dims for _, axes in spec.dims[dim]):
        return 0
    return math.prod(spec.shape[dim] for dim in dims)


SUMS: RewriteTable = {
    aten.add.Tensor: (
        Rewrite("a b + c d -> addmm(a b, c, d), matrices", _products, exact=False),
        Rewrite("mean + number -> sum, scaled while the number is added", _mean_and_number, exact=False),
        Rewrite("a + b * c -> addcmul(a, b, c)", _multiply_add, exact=False),
    ),
}
