"""Recognise attention masks that are constants, so that the fast attention kernels stay fast.

Traced Hugging Face models build their masks from arange and comparisons even when nothing is
padded. If a mask depends on no parameter and no input, it is computed here. If it is the causal
mask, the attention op (forward and backward alike) gets `is_causal=True` and no mask; if it hides
nothing, no mask. Any other mask (a sliding window shorter than the sequence, packed sequences)
stays. The masks are computed with broadcast dimensions kept at size one, so the batch size costs
nothing; masks of more than 2**28 elements after that are left alone.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

_LARGEST = 2**28


class MaskKind(enum.Enum):
    """What a constant mask hides."""

    NOTHING = "nothing"
    FUTURE = "future"  # query i sees keys 0..i
    OTHER = "other"


def fold_masks(graph: fx.Graph) -> int:
    """Fold the masks of a graph and return how many attention ops changed."""
    constants = _Constants()
    kinds: dict[fx.Node, MaskKind] = {}
    changed = 0
    for node in graph.nodes:
        mask = _argument(node, _mask_name(node))
        if not isinstance(mask, fx.Node):
            continue
        if mask not in kinds:
            kinds[mask] = _kind(constants.value(mask))
        if kinds[mask] is MaskKind.OTHER or _argument(node, "is_causal"):
            continue
        _set_argument(node, _mask_name(node), None)
        if kinds[mask] is MaskKind.FUTURE:
            _set_argument(node, "is_causal", True)
        changed += 1
    if changed:
        graph.eliminate_dead_code()
    return changed


def _mask_name(node: fx.Node) -> str:
    """The name of a fused attention op's mask argument, "" for any other node."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    if not node.target._schema.name.startswith("aten::_scaled_dot_product"):
        return ""
    names = [argument.name for argument in node.target._schema.arguments]
    if "is_causal" not in names:
        return ""
    return next((name for name in ("attn_mask", "attn_bias") if name in names), "")


def _position(node: fx.Node, name: str) -> int:
    assert isinstance(node.target, torch._ops.OpOverload)
    return [a.name for a in node.target._schema.arguments if not a.kwarg_only].index(name)


def _is_keyword(node: fx.Node, name: str) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    return any(a.name == name and a.kwarg_only for a in node.target._schema.arguments)


def _argument(node: fx.Node, name: str) -> Any:
    if not name:
        return None
    if name in node.kwargs or _is_keyword(node, name):
        return node.kwargs.get(name)
    place = _position(node, name)
    return node.args[place] if place < len(node.args) else None


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    if not _is_keyword(node, name) and _position(node, name) < len(node.args):
        node.update_arg(_position(node, name), value)
    elif value is None:
        node.kwargs = {key: old for key, old in node.kwargs.items() if key != name}
    else:
        node.update_kwarg(name, value)


def _kind(mask: torch.Tensor | None) -> MaskKind:
    if mask is None or mask.dim() < 2:
        return MaskKind.OTHER
    # A mask of booleans says what is seen; one of numbers is added to the scores, so 0 is seen.
    seen = mask if mask.dtype is torch.bool else mask == 0
    if mask.dtype is not torch.bool and bool(((mask != 0) & (mask > -1e4)).any()):
        return MaskKind.OTHER  # a bias, not a mask
    if bool(seen.all()):
        return MaskKind.NOTHING
    queries, keys = seen.shape[-2:]
    # Of equal numbers only: else it is convention which query sees which key.
    if queries == keys and bool((seen == torch.ones(queries, keys, dtype=torch.bool).tril()).all()):
        return MaskKind.FUTURE
    return MaskKind.OTHER


class _Constants:
    """Values of the nodes that depend on no placeholder, with broadcast dims kept narrow.

    A value whose slices along a dim are all alike is held with size one there and expanded (stride
    0).
    """

    def __init__(self) -> None:
        self._values: dict[fx.Node, torch.Tensor | None] = {}

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The value narrowed to size one along broadcast dims, or None if it is not a constant."""
        found = self._value(node)
        return None if found is None else _narrow(found)

    def _value(self, node: fx.Node) -> torch.Tensor | None:
        todo = [node]
        while todo:  # not by recursion: mask subgraphs can be long
            top = todo[-1]
            missing = [n for n in top.all_input_nodes if n not in self._values]
            if top in self._values or not missing:
                self._values.setdefault(todo.pop(), self._compute(top))
            else:
                todo.extend(missing)
        return self._values[node]

    def _compute(self, node: fx.Node) -> torch.Tensor | None:
        target = node.target
        inputs = [self._values[n] for n in node.all_input_nodes]
        if node.op != "call_function" or any(x is None for x in inputs):
            return None
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        # Computing it here would draw, and shift the numbers of the run.
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
        val = node.meta["val"]
        pointwise = torch.Tag.pointwise in target.tags
        size = _broadcast_numel([x for x in inputs if x is not None]) if pointwise else 0
        if not isinstance(val, torch.Tensor) or (size or _stored(target, val)) > _LARGEST:
            return None
        # Element by element, a broadcast dim may be computed once, if dims correspond one to one.
        narrow = pointwise and all(
            x is None or x.dim() == val.dim() or x.dim() == 0 for x in inputs
        )

        def real(n: fx.Node) -> torch.Tensor:
            x = self._values[n]
            assert x is not None
            return _narrow(x) if narrow else x

        # The graph may be for a device that is not here; values do not depend on it.
        kwargs = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        result = target(*map_arg(node.args, real), **map_arg(kwargs, real))
        if not isinstance(result, torch.Tensor):
            return None
        return _spread(result, val.shape, exact=narrow)


def _stored(target: Any, val: torch.Tensor) -> int:
    """Elements that running `target` writes; views write none."""
    return 0 if any(r.alias_info for r in target._schema.returns) else val.numel()


def _broadcast_numel(inputs: list[torch.Tensor]) -> int:
    shapes = [_narrow(x).shape for x in inputs]
    return torch.Size(torch.broadcast_shapes(*shapes)).numel()


def _narrow(x: torch.Tensor) -> torch.Tensor:
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _spread(x: torch.Tensor, shape: torch.Size, exact: bool) -> torch.Tensor:
    """Give `x` its full shape; a leading dim of equal slices becomes a broadcast one."""
    # Computed in full, but maybe the same mask for every sequence of the batch.
    if not exact and x.dim() and x.shape[0] > 1 and x.stride(0) != 0:
        first = x.narrow(0, 0, 1)
        if bool((x == first).all()):
            x = first
    return x.expand(shape)
