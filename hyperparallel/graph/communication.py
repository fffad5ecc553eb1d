"""The words for communication in a rank's program: call targets that say what moves, not how.

`runtime` binds them to process groups, `runtime.exec.virtual` to the other ranks of one process, the
simulator to a clock. Each collective of `collective_table.py` is a start, which returns a handle, and a
`wait` on the handle, which returns the tensor, or all tensors of a collective of many. A start takes the
operand, the collective's arguments, and last `axes`, the tuple of mesh axes that the group spans. Sizes are
elements along a dim, one entry per member of the group in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from hyperparallel.graph.collective import CollectiveKind, ManyCollective
from hyperparallel.graph.collective_table import COLLECTIVES

Axes = tuple[str, ...]
Start = Callable[..., Any]


def _word(name: str) -> Start:
    def start(*args: Any) -> NoReturn:
        raise AssertionError(f"{name}_start stands in a program that was not bound to ranks")

    start.__name__ = f"{name}_start"  # fx names nodes after it
    return start


def wait(pending: Any) -> Any:
    """The tensor that a started collective makes, or all tensors of one that makes many."""
    raise AssertionError("wait stands in a program that was not bound to ranks")


_WORDS: Mapping[str, Start] = {name: _word(name) for name in COLLECTIVES}

STARTS: Mapping[Any, CollectiveKind | ManyCollective] = {
    word: COLLECTIVES[name] for name, word in _WORDS.items()
}
"""Every target that starts a collective -> which; the group's axes are its last argument."""


def start_of(name: str) -> Start:
    """The target that starts a collective.

    >>> start_of("all_gather_many") is all_gather_many_start
    True
    """
    assert name in _WORDS, f"no collective is called {name}; there are {', '.join(_WORDS)}"
    return _WORDS[name]


all_reduce_start = start_of("all_reduce")
all_gather_start = start_of("all_gather")
reduce_scatter_start = start_of("reduce_scatter")
all_to_all_start = start_of("all_to_all")
permute_start = start_of("permute")
all_gather_many_start = start_of("all_gather_many")
reduce_scatter_many_start = start_of("reduce_scatter_many")
all_reduce_many_start = start_of("all_reduce_many")

SINGLE: Mapping[Any, Start] = {
    word: _WORDS[which.single.name] for word, which in STARTS.items() if which.single is not which
}
"""For a collective of many tensors, that of one: it takes one item of each list, and the other arguments."""


NEUTRAL = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def pend(x: torch.Tensor, op: str, keep: bool) -> torch.Tensor:
    """A whole value as this member's share of a pending reduction: `x` on one member, neutral on others."""
    # The reduction over members is x again, whichever member keeps it.
    return x if keep else torch.full_like(x, NEUTRAL[op])


Box = tuple[tuple[int, int], ...]
"""Per dim, (start, length)."""


def pack(x: torch.Tensor, blocks: Sequence[Box]) -> torch.Tensor:
    """The elements of `x` in the given blocks, one after another, as one flat tensor."""
    # `cat` of no tensors at all raises: a rank may have nothing to send.
    return torch.cat([x.new_empty(0), *(_block(x, block).reshape(-1) for block in blocks)])


def unpack(flat: torch.Tensor, blocks: Sequence[Box], shape: Sequence[int]) -> torch.Tensor:
    """A tensor of `shape` whose blocks, which tile it, are filled from `flat` in order."""
    whole = flat.new_empty(tuple(shape))
    start = 0
    for block in blocks:
        target = _block(whole, block)
        target.copy_(flat[start : start + target.numel()].view(target.shape))
        start += target.numel()
    return whole


def _block(x: torch.Tensor, block: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(block):
        x = x.narrow(dim, start, length)
    return x
