"""Remove what a functional graph does not need: copies, views that change nothing, repeated work.

Every rewrite keeps each value equal bit for bit:
- a view (or detach) with the shape and strides of a tensor it views is that tensor, so `t(t(x))`
  and a view there and back disappear;
- a copy that changes neither dtype, device nor memory order is its source;
- a view of a view is one view of the first tensor where strides allow it;
- pure nodes with equal target and arguments are one node, random ops never;
- what nobody uses goes, except random ops: removing one would shift all later random numbers.

A node merged from several repeated blocks belongs to none of them and loses its block. Metadata of
the surviving nodes is kept. Assumes no op of the graph writes to its inputs (AOTAutograd's output).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default}
_VIEWS = _RESHAPES | {
    _aten.alias.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
}
_COPIES = {_aten._to_copy.default, _aten.clone.default}
_SAME_SHAPE_IS_SAME = {_aten.slice_backward.default}
_UNIT = {
    _aten.mul.Tensor: 1,
    _aten.mul.Scalar: 1,
    _aten.div.Tensor: 1,
    _aten.div.Scalar: 1,
    _aten.pow.Tensor_Scalar: 1,
}


def tidy_graph(graph: fx.Graph) -> None:
    """Tidy a functional FX graph whose nodes carry `meta["val"]`."""
    seen: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        same = _same_as(node)
        if same is None:
            # Before the key is made, so that views of one tensor by different ways have one key.
            _merge_views(node)
            key = _key(node)
            if key is None:
                continue
            same = seen.setdefault(key, node)
            if same is node:
                continue
            _merge_blocks(same, node)
        node.replace_all_uses_with(same)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _geometry(node: fx.Node) -> tuple[Any, ...] | None:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return None
    return tuple(val.shape), val.stride(), val.storage_offset(), val.dtype, val.device


def _same_as(node: fx.Node) -> fx.Node | None:
    """An earlier node with the same value, seen from this node's arguments alone."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if node.target in _VIEWS:
        mine = _geometry(node)
        # Up the views, for one that already looked like this: t(t(x)), a view there and back.
        while mine is not None:
            if _geometry(source) == mine:
                return source
            if source.target not in _VIEWS or not isinstance(source.args[0], fx.Node):
                return None
            source = source.args[0]
        return None
    # A functional graph: nobody writes to either, so the copy is as good as its source.
    if node.target in _COPIES:
        return source if _unchanged(node, source) else None
    if node.target in _SAME_SHAPE_IS_SAME:
        return source if node.meta["val"].shape == source.meta["val"].shape else None
    return source if _is_unit(node, source) else None


def _unchanged(node: fx.Node, source: fx.Node) -> bool:
    """Whether a copy has its source's dtype, device and memory order (the offset may differ)."""
    mine, other = _geometry(node), _geometry(source)
    if mine is None or other is None:
        return False
    return mine[:2] == other[:2] and mine[3:] == other[3:]


def _is_unit(node: fx.Node, source: fx.Node) -> bool:
    """x * 1, x / 1, x ** 1, and x + 0 for integers (in floats -0.0 + 0 is not -0.0)."""
    if len(node.args) != 2 or node.kwargs or isinstance(node.args[1], fx.Node):
        return False
    if node.target is _aten.add.Tensor and node.args[1] == 0:
        val = node.meta["val"]
        return not val.is_floating_point() and val.dtype == source.meta["val"].dtype
    unit = _UNIT.get(node.target)  # type: ignore[call-overload]
    return unit is not None and unit == node.args[1] and _unchanged(node, source)


def _merge_views(node: fx.Node) -> None:
    """Make a view of a view a view of the first tensor, and write its shape out (no -1)."""
    if node.target not in _RESHAPES:
        return
    source, shape = node.args[0], list(node.meta["val"].shape)
    assert isinstance(source, fx.Node)
    while source.target in _RESHAPES:
        # Several views in between may go at once, as long as strides of the first allow the last shape.
        before = source.args[0]
        assert isinstance(before, fx.Node)
        if not _can_view(before.meta["val"], node.meta["val"]):
            break
        source = before
    # `_unsafe_view` only tells autograd something; with equal names equal views are one node.
    node.target = _aten.view.default
    node.args = (source, shape)


def _can_view(x: torch.Tensor, result: torch.Tensor) -> bool:
    if x.is_contiguous() and result.is_contiguous():
        return True
    try:
        return bool(x.view(result.shape).stride() == result.stride())
    except (RuntimeError, ValueError):
        return False


def _key(node: fx.Node) -> Hashable | None:
    """What makes two nodes equal; None for nodes that must stay apart."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        # Two draws with equal arguments are two numbers.
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return None
    elif getattr(target, "__module__", "") not in ("_operator", "operator"):
        return None
    return (target, _frozen(node.args), _frozen(node.kwargs))


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (bool, int, float)):
        sign = math.copysign(1.0, value) if isinstance(value, float) else 0.0
        return (type(value), value, sign)  # 1, 1.0 and True differ, as do 0.0 and -0.0
    return value  # type: ignore[no-any-return]


def _merge_blocks(kept: fx.Node, gone: fx.Node) -> None:
    mine, other = kept.meta.get("block"), gone.meta.get("block")
    if mine is not None and other is not None and mine[:2] != other[:2]:
        del kept.meta["block"]
