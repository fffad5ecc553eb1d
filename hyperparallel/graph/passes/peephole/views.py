"""Local rewrites of views and copies: fewer of them, never another value.

Views in a rank's program are `reshape`s, which view where strides allow it and copy where not. So a
reshape of a reshape is one reshape, a contiguous copy that is only reshaped need not be made
beforehand, and a transposed matrix is copied row by row and transposed afterwards, which a matmul
takes as it is.
"""

from __future__ import annotations

from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    RESHAPES,
    Call,
    Rewriter,
    RewriteTable,
    aten,
    calls,
    only_here,
    same_dtype,
    same_value_shape,
    whole,
    whole_shape,
)

_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_TRANSPOSES = (aten.t.default, aten.transpose.int)


def _no_view(node: Call, edit: Rewriter) -> fx.Node | None:
    """reshape(x, the shape of x) -> x"""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if same_value_shape(node, source) else None


def _one_view(node: Call, edit: Rewriter) -> fx.Node | None:
    """reshape(reshape(x, a), b) -> reshape(x, b), unless the inner one is a copy that others share"""
    source = node.args[0]
    if not calls(source, *RESHAPES):
        return None
    first = whole(source.args[0])
    if not only_here(source) and (first is None or not first.is_contiguous()):
        return None
    return edit.call(node, aten.reshape.default, source.args[0], node.args[1])


def _no_copy(node: Call, edit: Rewriter) -> fx.Node | None:
    """reshape(contiguous copy of x, s) -> reshape(x, s) for products, which take any strides"""
    copy = node.args[0]
    if not calls(copy, aten.clone.default, aten.contiguous.default) or not only_here(copy):
        return None
    if not _only_multiplied(node):
        return None
    return edit.call(node, aten.reshape.default, copy.args[0], node.args[1])


def _only_multiplied(node: fx.Node) -> bool:
    return all(
        calls(user, *_PRODUCTS) or (calls(user, *_TRANSPOSES) and _only_multiplied(user))
        for user in node.users
    )


def _transpose_later(node: Call, edit: Rewriter) -> fx.Node | None:
    """reshape(transpose(x, -1, -2), [n, a, b]) -> transpose(reshape(x, [n, b, a]), 1, 2)"""
    turned, shape = node.args[0], node.args[1]
    mine, before = whole_shape(node), whole_shape(turned)
    if not calls(turned, aten.transpose.int) or not only_here(turned):
        return None
    if mine is None or before is None or len(mine) != 3 or len(before) <= 3:
        return None
    if mine[1:] != before[-2:] or not _swaps_last(turned) or not _only_multiplied(node):
        return None
    rows, a, b = shape
    flat = edit.call(node, aten.reshape.default, turned.args[0], [rows, b, a])
    return edit.call(node, aten.transpose.int, flat, 1, 2)


def _swaps_last(node: Call) -> bool:
    """Whether a transpose swaps the last two dims."""
    value = whole(node)
    if value is None:
        return False
    return {d % value.dim() for d in node.args[1:3]} == {value.dim() - 2, value.dim() - 1}


def _turned_back(node: Call, edit: Rewriter) -> fx.Node | None:
    """transpose(transpose(x)) -> x"""
    source = node.args[0]
    if not calls(source, node.target) or tuple(source.args[1:]) not in (
        tuple(node.args[1:]),
        tuple(node.args[:0:-1]),
    ):
        return None
    return source.args[0] if isinstance(source.args[0], fx.Node) else None


def _div_before_expand(node: Call, edit: Rewriter) -> fx.Node | None:
    """expand(x) / n -> expand(x / n): once per element that is there"""
    source, by = node.args[:2]
    if not calls(source, aten.expand.default) or isinstance(by, fx.Node) or not only_here(source):
        return None
    if not same_dtype(node, source):
        return None
    divided = edit.call(node, node.target, source.args[0], by, like=source.args[0])
    return edit.call(node, aten.expand.default, divided, *source.args[1:])


def _no_expand(node: Call, edit: Rewriter) -> fx.Node | None:
    """expand(x) * y -> x * y where y alone has the shape of the product"""
    if node.kwargs or len(node.args) != 2:
        return None
    for i, y in enumerate(reversed(node.args)):
        x = node.args[i]
        if not calls(x, aten.expand.default) or not isinstance(y, fx.Node):
            continue
        if same_value_shape(y, node) and same_dtype(x, y, node):
            args = (x.args[0], y) if i == 0 else (y, x.args[0])
            return edit.call(node, node.target, *args)
    return None


def _narrow_sum(node: Call, edit: Rewriter) -> fx.Node | None:
    """reshape(sum(x, dims, keepdim=True), without those dims) -> sum(x, dims)"""
    total = node.args[0]
    if not calls(total, aten.sum.dim_IntList) or not only_here(total) or total.kwargs:
        return None
    kept, mine = total.meta.get("spec"), node.meta.get("spec")
    if len(total.args) != 3 or not total.args[2] or kept is None or mine is None:
        return None
    dims = {d % len(kept.dims) for d in total.args[1]}
    if not dims or mine.dims != tuple(n for i, n in enumerate(kept.dims) if i not in dims):
        return None
    return edit.call(node, aten.sum.dim_IntList, total.args[0], total.args[1])


_VIEW = (_one_view, _no_view, _no_copy, _transpose_later, _narrow_sum)
VIEWS: RewriteTable = {
    **dict.fromkeys(RESHAPES, _VIEW),
    **dict.fromkeys(_TRANSPOSES, (_turned_back,)),
    aten.div.Scalar: (_div_before_expand,),
    aten.div.Tensor: (_div_before_expand,),
    aten.mul.Tensor: (_no_expand,),
}
