"""Calls of a model told apart quickly: which kind a call is, and its tensors.

Most calls are flat: tensors and plain Python values by position or keyword. Those are taken apart without
building a tree. Two spellings of one call (by position, by keyword) are two kinds that share a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperparallel.graph.capture.batch_tree import CallTree
from hyperparallel.runtime.module.local_batch import call_signature

_PLAIN = frozenset((bool, int, float, str, type(None)))


@dataclass(frozen=True)
class Taken:
    """A call taken apart: a key that hashes, and its tensors, or None if it is not flat."""

    key: Any
    leaves: list[Tensor] | None


def take_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Taken:
    """A call's kind and tensors.

    >>> x = torch.zeros(2, 3)
    >>> one, two = take_apart((x,), {"n": 3}), take_apart((x + 1,), {"n": 3})
    >>> one.key == two.key, len(one.leaves), take_apart(([x],), {}).leaves is None
    (True, 1, True)
    """
    leaves: list[Tensor] = []
    key: list[Any] = [len(args), *kwargs]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            leaves.append(value)
            key += (value.shape, value.dtype, value.requires_grad)
        elif type(value) in _PLAIN:
            key += (type(value), value)  # True and 1 are equal
        else:
            return Taken(call_signature(args, kwargs), None)
    if torch._C._is_any_autocast_enabled():
        for device in sorted({leaf.device.type for leaf in leaves}):
            key.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
    return Taken(tuple(key), leaves)


def order_of_leaves(tree: CallTree, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """For each tensor that a program takes, its place among those of a flat call like this one."""
    marks: list[Tensor] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Tensor):
            # A stand-in for each place, since one tensor may be given at two.
            marks.append(torch.empty(0))
            return marks[-1]
        return value

    marked = [mark(value) for value in args]
    named = {name: mark(value) for name, value in kwargs.items()}
    places = {id(x): i for i, x in enumerate(marks)}
    return [places[id(x)] for x in tree.flatten(marked, named)]
