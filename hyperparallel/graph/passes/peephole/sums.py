"""Local rewrites of sums: a sum whose summands a kernel can make in place is one call.

| sum | becomes |
| --- | --- |
| zero-padded slices that tile a dim | their concatenation |
| products of matrices, also viewed | `addmm` into the first product |
| a + b * c | `addcmul(a, b, c)` |
| mean + number | sum scaled while the number is added |

Sums of three and more are looked at as a whole where their parts have no other users. Results equal
the originals up to the rounding of a sum in another order.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    RESHAPES,
    Call,
    Rewriter,
    RewriteTable,
    aten,
    calls,
    dtype,
    only_here,
    origin_args,
    same_dtype,
    same_value_shape,
    whole_shape,
)
from hyperparallel.shard.rules.slices import bounds


def is_sum(node: Any) -> TypeGuard[Any]:
    """Whether a node is a plain a + b of two tensors, all of one floating dtype."""
    if not calls(node, aten.add.Tensor) or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    return isinstance(a, fx.Node) and isinstance(b, fx.Node) and same_dtype(node, a, b)


def is_product(node: Any) -> TypeGuard[Any]:
    """Whether a node is a plain a * b of two tensors, all of one floating dtype."""
    if not calls(node, aten.mul.Tensor) or node.kwargs:
        return False
    a, b = node.args
    return isinstance(a, fx.Node) and isinstance(b, fx.Node) and same_dtype(node, a, b)


def summands(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum of sums, where the inner ones have no other users."""
    found: list[fx.Node] = []
    for term in node.args:
        assert isinstance(term, fx.Node)
        inner = is_sum(term) and only_here(term) and same_value_shape(term, node)
        found += summands(term) if inner else [term]
    return found


def _padded_slices(node: Call, edit: Rewriter) -> fx.Node | None:
    """... + pad(x) + pad(y) -> ... + cat(x, y) where x and y tile the dim they are padded along"""
    if not is_sum(node):
        return None
    terms = summands(node)
    padded = [n for n in terms if calls(n, aten.slice_backward.default) and only_here(n)]
    if len(padded) < 2:
        return None
    dim = _tiled_dim(padded)
    if dim is None:
        return None
    padded.sort(key=_start)
    pieces = [n.args[0] for n in padded]
    total = edit.call(node, aten.cat.default, pieces, dim, like=node)
    for term in terms:
        if term not in padded:
            total = edit.call(node, aten.add.Tensor, term, total, like=node)
    return total


def _range(node: fx.Node) -> tuple[int, int, int, int, int] | None:
    """dim, its global size, start, end, step of a padded slice of the whole tensor"""
    args = origin_args(node)
    if args is None or len(args) < 6 or len(node.args) < 6:
        return None
    _, shape, dim, start, end, step = args
    start, end = bounds(shape[dim], start, end)
    return dim % len(shape), shape[dim], start, end, step


def _start(node: fx.Node) -> int:
    found = _range(node)
    assert found is not None
    return found[2]


def _tiled_dim(padded: list[fx.Node]) -> int | None:
    """The dim that padded slices tile without gap or overlap, if they do."""
    ranges = [_range(n) for n in padded]
    known = [r for r in ranges if r is not None]
    if len(known) < len(padded) or len({r[:2] for r in known}) > 1:
        return None
    dim, size, *_ = known[0]
    at = 0
    for _, _, start, end, step in sorted(known, key=lambda r: r[2]):
        if start != at or step != 1:
            return None
        at = end
    return dim if at == size else None


_MATRIX = (aten.mm.default, aten.addmm.default)


def _products(node: Call, edit: Rewriter) -> fx.Node | None:
    """view(mm(a, b)) + view(mm(c, d)) -> view(addmm(mm(a, b), c, d)), the views alike or absent"""
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
    """a + b * c -> addcmul(a, b, c)"""
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
    """mean(x, dims) + c -> add(c, sum(x, dims), alpha=1/n)"""
    mean, number = node.args[0], node.args[1]
    if not calls(mean, aten.mean.dim) or not only_here(mean) or mean.kwargs or node.kwargs:
        return None
    kind, dims = dtype(mean), mean.args[1] if len(mean.args) > 1 else None
    if isinstance(number, fx.Node) or not dims or not same_dtype(mean, mean.args[0]):
        return None
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


def _square(node: Call, edit: Rewriter) -> fx.Node | None:
    """x ** 2 -> x * x"""
    x, exponent = node.args
    if exponent != 2 or not same_dtype(x, node):
        return None
    return edit.call(node, aten.mul.Tensor, x, x)


SUMS: RewriteTable = {
    aten.add.Tensor: (_padded_slices, _products, _mean_and_number),
    aten.pow.Tensor_Scalar: (_square,),
}
FUSED_SUMS: RewriteTable = {aten.add.Tensor: (_multiply_add,)}
