"""Local rewrites of rotary positions: swap the halves in one call, put the signs into the table.

Rotating writes cat(-b, a) * sin for x = (a, b); its gradient the same with the halves of x * sin. Both
are roll(x) * s with s made once by setup: the sine table with one half negated (and, for the gradient,
the halves exchanged). What is left is x * cos + roll(x) * s: the same products and sums, so the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from hyperparallel.graph.passes.peephole.rewrite import (
    Call,
    Rewrite,
    Rewriter,
    RewriteTable,
    aten,
    calls,
    is_product,
    only_here,
    origin_args,
    whole,
    whole_shape,
)
from hyperparallel.shard.rules.slices import bounds


@dataclass(frozen=True)
class _Swapped:
    """cat(+-upper half of x, +-lower half of x) along the last dim."""

    x: fx.Node
    half: int
    """Elements of one half on this rank."""
    negative: tuple[bool, bool]


def _swapped(node: Any) -> _Swapped | None:
    if not calls(node, aten.cat.default) or len(node.args[0]) != 2:
        return None
    value = whole(node)
    dim = node.args[1] if len(node.args) > 1 else 0
    if value is None or dim % value.dim() != value.dim() - 1:
        return None
    upper, lower = node.args[0]
    negative = (calls(upper, aten.neg.default), calls(lower, aten.neg.default))
    upper = upper.args[0] if negative[0] else upper
    lower = lower.args[0] if negative[1] else lower
    high, low = _part(upper), _part(lower)
    size = value.shape[-1]
    if high is None or low is None or upper.args[0] is not lower.args[0]:
        return None
    # Exactly the two halves: roll by one half swaps them only then.
    if (high, low) != ((size // 2, size), (0, size - size // 2)) or size % 2:
        return None
    return _Swapped(upper.args[0], upper.args[2], negative)


def _part(node: Any) -> tuple[int, int] | None:
    """Start and end of a slice of the last dim of the whole tensor."""
    args = origin_args(node) if calls(node, aten.slice.Tensor) else None
    if args is None or len(args) != 4 or len(node.args) != 4:
        return None
    source = whole(node.args[0])
    if source is None or args[1] % source.dim() != source.dim() - 1:
        return None
    return bounds(source.shape[-1], *args[2:])


def _rotated(node: Call, edit: Rewriter) -> fx.Node | None:
    """Table and result for x = (a, b): s = cat(-sin_a, sin_b), roll(x) * s."""
    if not is_product(node):
        return None
    for turned, table in (node.args, node.args[::-1]):
        found = _swapped(turned)
        if found is None or not only_here(turned) or not _is_table(table, found):
            continue
        lower, upper = _halves(edit, table, found.half)
        return _roll(node, edit, found, table, (lower, upper))
    return None


def _rotated_back(node: Call, edit: Rewriter) -> fx.Node | None:
    """The same for a gradient g with g * sin = (u, v): s = cat(sin_b, -sin_a), roll(g) * s."""
    found = _swapped(node)
    if found is None or not is_product(found.x):
        return None
    for gradient, table in (found.x.args, found.x.args[::-1]):
        same = whole_shape(gradient) == whole_shape(node)
        if same and not gradient.meta["constant"] and _is_table(table, found):
            lower, upper = _halves(edit, table, found.half)
            # The roll is taken of the gradient itself: its product with the table is what is left out.
            swapped = _Swapped(gradient, found.half, found.negative)
            return _roll(node, edit, swapped, table, (upper, lower))
    return None


def _is_table(table: Any, found: _Swapped) -> bool:
    """Whether a factor is made by setup and as wide as what it is multiplied with."""
    shape, mine = whole_shape(table), whole_shape(found.x)
    return bool(table.meta["constant"] and shape and mine and shape[-1] == mine[-1])


def _halves(edit: Rewriter, table: fx.Node, half: int) -> tuple[fx.Node, fx.Node]:
    lower = edit.constant(aten.slice.Tensor, table, -1, 0, half)
    return lower, edit.constant(aten.slice.Tensor, table, -1, half, 2 * half)


def _roll(
    node: fx.Node,
    edit: Rewriter,
    found: _Swapped,
    table: fx.Node,
    halves: tuple[fx.Node, fx.Node],
) -> fx.Node:
    """roll(x) times the table made of two halves, each negated if the swapped one was."""
    signed = [
        edit.constant(aten.neg.default, half) if minus else half
        for half, minus in zip(halves, found.negative, strict=True)
    ]
    signs = edit.constant(aten.cat.default, signed, -1)
    # It stands for the whole table too: rewrites that follow ask for its shape and dtype.
    signs.meta["origin"] = table.meta["origin"]
    rolled = edit.call(node, aten.roll.default, found.x, [found.half], [-1], like=found.x)
    return edit.call(node, aten.mul.Tensor, rolled, signs)


ROTARY: RewriteTable = {
    aten.mul.Tensor: (Rewrite("cat(-b, a) * sin -> roll(x) * s, x = (a, b), s made once", _rotated),),
    aten.cat.default: (Rewrite("cat(v, -u) of g * sin = (u, v) -> roll(g) * s, s made once", _rotated_back),),
}
