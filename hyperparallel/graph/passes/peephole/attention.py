"""Local rewrites of attention that is spelled out: scale and mask ride with the matrix products.

scores = mask + a * (q k'): one `baddbmm` that starts from the mask and scales by `alpha`, where the mask
is a constant that is the same for all heads. A scaled operand of batched products, as the gradient of
the scores is, is scaled by their `alpha` instead, while the result is written.
"""

from __future__ import annotations

from typing import Any

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
    same_dtype,
    whole_shape,
)
from hyperparallel.graph.passes.peephole.sums import is_sum


def _viewed_product(node: Any) -> fx.Node | None:
    """The bmm that `node` is a view of, if nothing else needs either."""
    if not calls(node, *RESHAPES) or not only_here(node):
        return None
    product = node.args[0]
    return product if calls(product, aten.bmm.default) and only_here(product) else None


def _scaled_product(node: Any) -> tuple[fx.Node, fx.Node, float] | None:
    """(bmm, its view, number) of `view(bmm) * number`"""
    if not calls(node, aten.mul.Tensor, aten.mul.Scalar) or node.kwargs:
        return None
    view, number = node.args
    product = _viewed_product(view)
    if product is None or isinstance(number, fx.Node) or not same_dtype(node, product):
        return None
    return product, view, float(number)


def _masked_scores(node: Call, edit: Rewriter) -> fx.Node | None:
    """view(bmm(q, k)) * a + mask -> view(baddbmm(mask, q, k, alpha=a))"""
    if not is_sum(node):
        return None
    for scaled, mask in (node.args, node.args[::-1]):
        found = _scaled_product(scaled)
        if found is None or not only_here(scaled) or not _for_all_heads(mask, scaled):
            continue
        product, view, number = found
        spec = mask.meta["spec"]
        base = edit.constant(aten.reshape.default, mask, list(spec.local_shape(edit.rank)[-2:]))
        scores = edit.call(node, aten.baddbmm.default, base, *product.args, alpha=number, like=product)
        return edit.call(node, aten.reshape.default, scores, view.args[1])
    return None


def _for_all_heads(mask: Any, scores: fx.Node) -> bool:
    """Whether a mask is a constant with equal queries and keys, and no other dims to speak of."""
    shape, other = whole_shape(mask), whole_shape(scores)
    if shape is None or other is None or not mask.meta["constant"] or len(shape) < 2:
        return False
    mine, theirs = mask.meta.get("spec"), scores.meta.get("spec")
    if mine is None or theirs is None or mine.dims[-2:] != theirs.dims[-2:]:
        return False
    return all(n == 1 for n in shape[:-2])


def _scale_by_alpha(node: Call, edit: Rewriter) -> fx.Node | None:
    """view(bmm(q, k)) * a -> view(baddbmm(nothing, q, k, beta=0, alpha=a))"""
    found = _scaled_product(node)
    if found is None:
        return None
    product, view, number = found
    scaled = _alpha(node, edit, product, product.args, number)
    return edit.call(node, aten.reshape.default, scaled, view.args[1])


def _scale_operand_by_alpha(node: Call, edit: Rewriter) -> fx.Node | None:
    """bmm(x, view(y * a)) -> baddbmm(nothing, x, view(y), beta=0, alpha=a)"""
    for i in (0, 1):
        view, factor = node.args[i], 1.0
        while calls(view, aten.transpose.int):
            view = view.args[0]
        if not calls(view, *RESHAPES) or not _only_batched(view):
            continue
        scaled = view.args[0]
        if not calls(scaled, aten.mul.Tensor, aten.mul.Scalar) or not only_here(scaled):
            continue
        y, factor = scaled.args
        if isinstance(factor, fx.Node) or scaled.kwargs or not same_dtype(scaled, y, node):
            continue
        return _unscale(view, y, float(factor), edit, node)
    return None


def _unscale(view: fx.Node, y: Any, factor: float, edit: Rewriter, asked: fx.Node) -> fx.Node | None:
    """Take the factor out of a view and give it to every product that reads the view."""
    products = _batched(view)
    plain = edit.call(view, aten.reshape.default, y, view.args[1])
    edit.replace(view, plain)
    new = None
    for product in products:
        scaled = _alpha(product, edit, product, product.args, factor)
        if product is asked:
            new = scaled
        else:
            edit.replace(product, scaled)
    return new


def _batched(view: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for user in view.users:
        found += _batched(user) if calls(user, aten.transpose.int) else [user]
    return list(dict.fromkeys(found))


def _only_batched(view: fx.Node) -> bool:
    """Whether a view is read by batched products alone, once by each."""
    users = [
        u for user in view.users for u in (_batched(user) if calls(user, aten.transpose.int) else [user])
    ]
    return len(set(users)) == len(users) and all(calls(u, aten.bmm.default) for u in users)


def _alpha(at: fx.Node, edit: Rewriter, product: fx.Node, args: Any, number: float) -> fx.Node:
    kind = dtype(product)
    assert kind is not None
    nothing = edit.scalar(0.0, kind, (1, 1, 1))
    return edit.call(at, aten.baddbmm.default, nothing, *args, beta=0, alpha=number, like=product)


ATTENTION: RewriteTable = {
    aten.add.Tensor: (_masked_scores,),
    aten.bmm.default: (_scale_operand_by_alpha,),
}
SCALED_PRODUCTS: RewriteTable = {
    aten.mul.Tensor: (_scale_by_alpha,),
    aten.mul.Scalar: (_scale_by_alpha,),
}
