"""The local rewrite of the gradient of RMS norm: five passes over the data instead of eleven.

For h = x r with r = rsqrt(mean(x^2) + eps), y = w h, and dy given, autograd writes

    dx = G r - x r^3 sum(G x) / D,    G = w dy

which is r (G - h c) with c = sum(G h) / D, and G h = w (dy h), where dy h is at hand for the gradient of
w: its product with w as a matrix times a vector gives c without another pass. A residual gradient
rides along: dx = res + r (G - h c). D must be whole on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    Call,
    Rewriter,
    RewriteTable,
    aten,
    calls,
    dtype,
    same_value_shape,
    whole_shape,
)
from hyperparallel.graph.passes.peephole.sums import is_product, is_sum, summands


def _rms_gradient(node: Call, edit: Rewriter) -> fx.Node | None:
    """... + G * r - x * r**3 * sum(G * x) / D -> addcmul(..., G - h * c, r)"""
    if not is_sum(node):
        return None
    terms = summands(node)
    for inner in terms:
        parts = _inner(inner)
        outer = None if parts is None else _factors(node, terms, parts)
        if parts is None or outer is None:
            continue
        _, r, gradient = parts
        h, weight, plain = outer
        rest = [t for t in terms if t is not inner and not _is_product_of(t, gradient, r)]
        if len(rest) != len(terms) - 2:
            continue
        bracket = _bracket(node, edit, h, weight, plain, gradient)
        if not rest:
            return edit.call(node, aten.mul.Tensor, bracket, r)
        total = rest[0]
        for term in rest[1:]:
            total = edit.call(node, aten.add.Tensor, total, term, like=node)
        return edit.call(node, aten.addcmul.default, total, bracket, r)
    return None


def _bracket(
    node: fx.Node, edit: Rewriter, h: fx.Node, weight: fx.Node, plain: fx.Node, gradient: fx.Node
) -> fx.Node:
    """G - h * sum(G * h) / D"""
    kind = dtype(node)
    assert kind is not None
    size = node.meta["spec"].shape[-1]
    shape = list(node.meta["spec"].local_shape(edit.rank))
    product = _at_hand(h, plain, node) or edit.call(node, aten.mul.Tensor, plain, h, like=node)
    rows = edit.call(node, aten.reshape.default, product, [-1, size])
    nothing = edit.scalar(0.0, kind, (1,))
    c = edit.call(node, aten.addmv.default, nothing, rows, weight, beta=0, alpha=-1.0 / size)
    c = edit.call(node, aten.reshape.default, c, [*shape[:-1], 1])
    return edit.call(node, aten.addcmul.default, gradient, h, c, like=node)


def _at_hand(a: fx.Node, b: fx.Node, node: fx.Node) -> fx.Node | None:
    """a * b, where the program has it before `node`"""
    return next((u for u in a.users if u < node and _is_product_of(u, a, b)), None)


def _inner(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x, r and G of (sum(G * x) * -0.5 * r**3) / D * (x * 2)"""
    if not is_product(node):
        return None
    for spread, twice in (node.args, node.args[::-1]):
        if not _by(twice, 2.0) or not calls(spread, aten.div.Scalar, aten.div.Tensor):
            continue
        x, wide = twice.args[0], spread.args[0]
        shape = whole_shape(x)
        if not calls(wide, aten.expand.default) or not shape or spread.args[1] != shape[-1]:
            continue
        found = _mean_gradient(wide.args[0], x)
        if found is not None:
            return x, *found
    return None


def _mean_gradient(node: Any, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """r and G of sum(G * x) * -0.5 * r**3"""
    if not is_product(node):
        return None
    for halved, cube in (node.args, node.args[::-1]):
        if not _by(halved, -0.5) or not calls(cube, aten.pow.Tensor_Scalar) or cube.args[1] != 3:
            continue
        total = halved.args[0]
        if not calls(total, aten.sum.dim_IntList) or not is_product(total.args[0]):
            continue
        dims, keepdim = total.args[1], total.args[2] if len(total.args) > 2 else False
        shape = whole_shape(x)
        if not keepdim or not shape or [d % len(shape) for d in dims] != [len(shape) - 1]:
            continue
        a, b = total.args[0].args
        if x in (a, b):
            return cube.args[0], b if a is x else a
    return None


def _factors(
    node: fx.Node, terms: list[fx.Node], parts: tuple[fx.Node, fx.Node, fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """h = x * r, the weight w and dy of G = dy * w, if G * r is one of the terms"""
    x, r, gradient = parts
    h = _at_hand(x, r, node)
    if h is None or not is_product(gradient) or not _whole_rows(x):
        return None
    if not any(_is_product_of(t, gradient, r) for t in terms):
        return None
    for plain, weight in (gradient.args, gradient.args[::-1]):
        shape = whole_shape(weight)
        if shape == (x.meta["spec"].shape[-1],) and same_value_shape(plain, x):
            return (h, weight, plain) if same_value_shape(gradient, x) else None
    return None


def _whole_rows(x: fx.Node) -> bool:
    """Whether no rank holds only a part of the last dim, and it is not empty."""
    spec = x.meta.get("spec")
    if spec is None or not spec.shape[-1]:
        return False
    return not any(axes for _, axes in spec.dims[-1])


def _by(node: Any, number: float) -> bool:
    return calls(node, aten.mul.Scalar, aten.mul.Tensor) and node.args[1] == number


def _is_product_of(node: Any, a: fx.Node, b: fx.Node) -> bool:
    return is_product(node) and tuple(node.args) in ((a, b), (b, a))


NORMS: RewriteTable = {aten.add.Tensor: (_rms_gradient,)}
