"""Replace nodes of one rank's program: the tool that local rewrites are written with.

A rewrite looks at a node and returns the node that takes its place, or None. What it may look at
is the same on every rank: targets, users, and the whole value that a local tensor is a piece of
(`whole_shape`, `dtype`, `origin`); never this rank's own sizes, since pieces may be uneven or empty and
all ranks must end with the same nodes. What partition did not note (a value inside a local form) is
unknown, and rewrites leave it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from hyperparallel.graph.program import RankProgram
from hyperparallel.plan.derived import RewriteCount

aten = torch.ops.aten
Call = Any
"""A node that calls an op: its arguments are what the op takes, which types can't say."""


@dataclass(frozen=True)
class Rewrite:
    """One rewrite, in words ("what -> what it becomes") and as a function: the node to take, or None.

    exact: every bit of the result stays, on any device; zeros may change their sign.
    """

    words: str
    apply: Callable[[Call, Rewriter], fx.Node | None]
    exact: bool = True


RewriteTable = Mapping[Any, Sequence[Rewrite]]
"""Target -> the rewrites of nodes that call it, tried in order."""

_COPIED = ("backward", "module", "constant")
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


class Rewriter:
    """Edits the graph of `program`; nodes that lose their last user are removed at once."""

    def __init__(self, program: RankProgram) -> None:
        self.graph, self.rank, self.only_exact = program.graph, program.rank, program.exact
        self.erased: set[fx.Node] = set()
        self._made: Counter[Rewrite] = Counter()
        self._calls_saved: Counter[Rewrite] = Counter()
        self._calls = 0  # that a step makes, against the program as it came
        self._constants: dict[Any, fx.Node] = {}
        self._front = [n for n in self.graph.nodes if n.op == "placeholder"][-1:]

    def sweep(self, table: RewriteTable) -> None:
        """Offer every node, operands before users, to the rewrites of its target."""
        for node in list(self.graph.nodes):
            # What a rewrite returns is offered again: sums of sums fold one by one.
            while node not in self.erased and node.op == "call_function":
                new = self._rewritten(node, table.get(node.target, ()))
                if new is None:
                    break
                node = new

    def _rewritten(self, node: fx.Node, rewrites: Sequence[Rewrite]) -> fx.Node | None:
        for rewrite in rewrites:
            calls_before = self._calls
            new = rewrite.apply(node, self) if rewrite.exact or not self.only_exact else None
            if new is not None:
                self.replace(node, new)
                self._made[rewrite] += 1
                self._calls_saved[rewrite] += calls_before - self._calls
                return new
        return None

    def counts(self) -> tuple[RewriteCount, ...]:
        """What was rewritten so far, by rewrite."""
        return tuple(
            RewriteCount(rewrite.words, rewrite.exact, count, self._calls_saved[rewrite])
            for rewrite, count in self._made.items()
        )

    def call(
        self, at: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """A node in front of `at`, of its stage and module; like: a node with the same whole value."""
        with self.graph.inserting_before(at):
            node = self.graph.call_function(target, args, kwargs)
        self._calls += 1
        node.meta.update({key: at.meta[key] for key in _COPIED})
        if like is not None:
            _describe(node, like)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let the users of `old` use `new`, and remove what only `old` used."""
        _describe(new, old)
        old.replace_all_uses_with(new)
        self._erase(old)

    def constant(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that setup runs once, made of constants; equal calls are one node."""
        key = (target, str(args), str(kwargs))
        if key not in self._constants:
            sources = [a for a in _flat(args) if isinstance(a, fx.Node) and a.op == "call_function"]
            # Behind the last constant that it is made of, else in front of the program.
            place = max(sources) if sources else next(iter(self._front), self.graph._root)
            with self.graph.inserting_after(place):
                node = self.graph.call_function(target, args, kwargs)
            node.meta.update(backward=False, module="", constant=True)
            self._constants[key] = node
        return self._constants[key]

    def scalar(self, value: float, kind: torch.dtype) -> fx.Node:
        """A constant tensor without dims."""
        return self.constant(aten.full.default, [], value, dtype=kind)

    def _erase(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        self.graph.erase_node(node)
        self.erased.add(node)
        # What setup runs is no call of a step.
        self._calls -= not node.meta["constant"]
        for used in operands:
            if not used.users and used not in self.erased and _is_pure(used):
                self._erase(used)


def _describe(node: fx.Node, like: fx.Node) -> None:
    for key in ("origin", "spec"):
        if key in like.meta:
            # What a node was noted as first stays: it may be taken in the place of several.
            node.meta.setdefault(key, like.meta[key])


def _flat(args: Any) -> list[Any]:
    return [x for a in args for x in (_flat(a) if isinstance(a, (list, tuple)) else [a])]


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def calls(node: Any, *targets: Any) -> TypeGuard[Any]:
    """Whether `node` is a call of one of `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_sum(node: Any) -> TypeGuard[Any]:
    """Whether a node is a plain a + b of two tensors, all of one floating dtype."""
    return _is_plain(node, aten.add.Tensor)


def is_product(node: Any) -> TypeGuard[Any]:
    """Whether a node is a plain a * b of two tensors, all of one floating dtype."""
    return _is_plain(node, aten.mul.Tensor)


def _is_plain(node: Any, target: Any) -> bool:
    if not calls(node, target) or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    return isinstance(a, fx.Node) and isinstance(b, fx.Node) and same_dtype(node, a, b)


def only_here(node: fx.Node) -> bool:
    """Whether a node has a single user, so that a rewrite of that user makes it vanish."""
    return len(node.users) == 1


def whole(node: Any) -> Tensor | None:
    """The (fake) whole tensor that a node's value is a piece of, None where that is unknown."""
    origin = node.meta.get("origin") if isinstance(node, fx.Node) else None
    value = origin.meta.get("val") if origin is not None else None
    return value if isinstance(value, Tensor) else None


def whole_shape(node: Any) -> tuple[int, ...] | None:
    """The global shape of a node's value, None where that is unknown."""
    value = whole(node)
    return None if value is None else tuple(value.shape)


def dtype(node: Any) -> torch.dtype | None:
    """The dtype of a node's value, None where that is unknown."""
    value = whole(node)
    return None if value is None else value.dtype


def same_dtype(*nodes: Any) -> bool:
    """Whether all values are known to have one floating dtype."""
    kinds = {dtype(node) for node in nodes}
    return len(kinds) == 1 and all(k is not None and k.is_floating_point for k in kinds)


def same_value_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values are known to have one shape on every rank: equal sizes, equally cut."""
    mine, other = a.meta.get("spec"), b.meta.get("spec")
    return mine is not None and other is not None and mine.dims == other.dims


def origin_args(node: fx.Node) -> tuple[Any, ...] | None:
    """The arguments of the same op on the whole tensor."""
    origin = node.meta.get("origin")
    return origin.args if origin is not None and origin.target == node.target else None
