"""Start/wait pairs in a rank's program: what a start needs, who reads what its wait gives, how starts join.

A start is whatever a `wait` waits for, on any stream: a collective, or a copy between memory tiers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.collective import ManyCollective

_CAST = torch.ops.aten._to_copy.default
_PREPARES = {_CAST, torch.ops.aten.reshape.default, communication.pack, communication.pend}

MANY_OF: dict[Any, Any] = {single: many for many, single in communication.SINGLE.items()}
"""For a collective of one tensor, that of many."""


def origin(node: fx.Node) -> fx.Node:
    """What a value is a cast of; itself where it is none."""
    while node.target is _CAST:
        (node,) = node.all_input_nodes
    return node


def starts_of(graph: fx.Graph) -> list[fx.Node]:
    """What is waited for, in order."""
    return [node for node in graph.nodes if any(user.target is communication.wait for user in node.users)]


def is_fetch(start: fx.Node) -> bool:
    """Whether what a start takes stays where it is: a parameter, or what lies in another memory tier.

    It may be cast, viewed or packed before.
    """
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        # What lies in another tier stays there when it is fetched; on the device it was just made.
        if node.target is communication.wait:
            if node.all_input_nodes[0].meta["transfer"].tier == "device":
                return False
        elif node.op == "call_function":
            if node.target not in _PREPARES and not is_view(node):
                return False
            todo.extend(node.all_input_nodes)
    return True


def is_view(node: fx.Node) -> bool:
    """Whether an op's result may be its operand's memory."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returned = node.target._schema.returns
    # The schema tells: a view declares that its result aliases an operand. `_unsafe_view` does so undeclared.
    shares = bool(returned) and returned[0].alias_info is not None
    return shares or node.target is torch.ops.aten._unsafe_view.default


def parts_of(start: fx.Node) -> list[Any]:
    """What a start takes and does, by tensor: equal for equal tensors moved alike."""
    one = communication.SINGLE.get(start.target, start.target)
    known = communication.STARTS.get(start.target)
    parts = known.singles(start.args) if known else [start.args]
    return [(one, *(tuple(arg) if isinstance(arg, list) else arg for arg in own)) for own in parts]


def results_of(start: fx.Node) -> list[fx.Node]:
    """The nodes that give what a start makes: its wait, or the items of one that makes several."""
    (wait,) = start.users
    items = [user for user in wait.users if user.target is operator.getitem]
    if start.target not in communication.SINGLE:
        return [wait]
    return sorted(items, key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]


def is_handed_out(start: fx.Node) -> bool:
    """Whether nothing computes with what a start makes: it is cast, viewed, moved on or returned."""
    todo = list(start.users)
    while todo:
        node = todo.pop()
        if node.op != "output":
            if len(node.all_input_nodes) != 1 and "transfer" not in node.meta:
                return False
            todo.extend(node.users)  # also of what it is moved on by: the program may compute with that
    return True


def join_starts(graph: fx.Graph, starts: Sequence[fx.Node], before: fx.Node, module: str) -> fx.Node:
    """Put one collective of many tensors in the place of several of one; returns its start.

    before: where it is put. module: where it is said to be needed.
    """
    last = starts[-1]
    many = MANY_OF[last.target]
    kind = communication.STARTS[many]
    assert isinstance(kind, ManyCollective)
    args = kind.joined([start.args for start in starts])
    # Readers of an earlier start may stand in front of `before`: `overlap`, the last pass, puts them behind.
    with graph.inserting_before(before):
        joined = graph.call_function(many, args)
        previous = waited = graph.call_function(communication.wait, (joined,))
    # Each item stands behind the one before, so that the program reads in the order of the tensors.
    for i, start in enumerate(starts):
        (wait,) = start.users
        with graph.inserting_after(previous):
            item = previous = graph.call_function(operator.getitem, (waited, i))
        item.meta.update(wait.meta)
        wait.replace_all_uses_with(item)
        graph.erase_node(wait)
        graph.erase_node(start)
    transfers = [start.meta["transfer"] for start in starts]
    for node in (joined, waited):
        node.meta.update({k: last.meta[k] for k in ("backward", "constant", "itemsize", "dtype")})
        node.meta["module"] = module
    joined.meta["transfer"] = replace(
        transfers[-1],
        num_bytes=sum(t.num_bytes for t in transfers),
        held_bytes=sum(t.held_bytes for t in transfers),
        value=", ".join(t.value for t in transfers),
        module=module,
    )
    return joined
