"""The local rewrite of padded slices: gradients of the pieces of a tensor are put side by side.

The gradient of a slice is as large as the tensor, zero outside of the slice. Where several such gradients
tile a dim, their sum is a concatenation. Adding zero changes no value, so the result is the same; where
more than one other term is added too, it would be added in another order, and the sum stays.
"""

from __future__ import annotations

from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    Call,
    Rewrite,
    Rewriter,
    RewriteTable,
    aten,
    calls,
    is_sum,
    only_here,
    origin_args,
    same_value_shape,
)
from hyperparallel.shard.rules.slices import bounds


def _tiled(node: Call, edit: Rewriter) -> fx.Node | None:
    if not is_sum(node):
        return None
    terms = _terms(node)
    padded = [term for term in terms if calls(term, aten.slice_backward.default) and only_here(term)]
    others = [term for term in terms if term not in padded]
    # With two other terms the sum would be (a + b) + whole where it was (a + part) + b.
    if len(padded) < 2 or len(others) > 1:
        return None
    dim = _tiled_dim(padded)
    if dim is None:
        return None
    padded.sort(key=_start)
    whole = edit.call(node, aten.cat.default, [term.args[0] for term in padded], dim, like=node)
    return edit.call(node, aten.add.Tensor, others[0], whole, like=node) if others else whole


def _terms(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum of sums, where the inner ones have no other users."""
    found: list[fx.Node] = []
    for term in node.args:
        assert isinstance(term, fx.Node)
        inner = is_sum(term) and only_here(term) and same_value_shape(term, node)
        found += _terms(term) if inner else [term]
    return found


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
        # A gap is zeros that a concatenation lacks, an overlap a sum that it does not do.
        if start != at or step != 1:
            return None
        at = end
    return dim if at == size else None


SLICES: RewriteTable = {
    aten.add.Tensor: (Rewrite("padded slices that tile a dim -> their concatenation", _tiled),),
}
