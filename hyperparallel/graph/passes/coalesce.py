"""One collective for the parameters of a block, and one for its gradients, where they are cut alike.

Gathers over the same axes that need nothing but parameters, and reductions whose results nothing in the
program waits for, go together if they belong to one block and phase: as many bytes in a few messages.
A block is what stands under one number in the model's names, one layer of a stack; what stands outside
of blocks (embedding, head) stays alone, so that it is not gathered long before it is used.

The collective takes all tensors with their dims and sizes; whether they are packed is the transport's
business. Placed where the first gather, or the last reduction, stood.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.program import RankProgram

_MANY = {single: many for many, single in communication.SINGLE.items()}


def coalesce(program: RankProgram) -> RankProgram:
    """Join what goes together, in place; every rank joins the same starts."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if not _joinable(node):
            continue
        phase = not program.joint and node.meta["backward"]
        again = node.target is communication.all_gather_start and node.meta["backward"]
        block = block_of(node.meta["module"])
        key = (node.target, node.args[3:], node.meta["dtype"], phase, again, block)
        groups.setdefault(key, []).append(node)
    for starts in groups.values():
        if len(starts) > 1:
            _join(program.graph, starts)
    return program


def block_of(module: str) -> str:
    """The path of the block that a module lies in, "" where it lies in none.

    >>> block_of("model.layers.3.mlp.down_proj"), block_of("lm_head")
    ('model.layers.3', '')
    """
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def needs_parameters_only(start: fx.Node) -> bool:
    """Whether a start depends on placeholders alone, through local nodes that move no data to speak of."""
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node.op == "call_function":
            if node.target is communication.wait or len(node.all_input_nodes) != 1:
                return False
            todo.extend(node.all_input_nodes)
    return True


def _joinable(node: fx.Node) -> bool:
    if node.target not in _MANY or node.meta["constant"] or "dtype" not in node.meta:
        return False
    if not block_of(node.meta["module"]):
        return False
    if node.target is communication.all_gather_start:
        return needs_parameters_only(node)
    return all(map(_is_result, node.users))


def _is_result(wait: fx.Node) -> bool:
    """Whether what a wait gives is only handed out of the program, as it is or cast or viewed."""
    todo = [wait]
    while todo:
        node = todo.pop()
        if node.op != "output":
            if len(node.all_input_nodes) != 1:
                return False
            todo.extend(node.users)
    return True


def _join(graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
    first, last = starts[0], starts[-1]
    gathers = first.target is communication.all_gather_start
    if gathers:
        for start in starts[1:]:
            _move_chain(start, first)
    lists = [list(parts) for parts in zip(*(start.args[:3] for start in starts), strict=True)]
    with graph.inserting_before(first if gathers else last):
        joined = graph.call_function(_MANY[first.target], (*lists, *first.args[3:]))  # type: ignore[index]
        waited = graph.call_function(communication.wait, (joined,))
    previous = waited
    for i, start in enumerate(starts):
        (wait,) = start.users
        with graph.inserting_after(previous):
            item = previous = graph.call_function(operator.getitem, (waited, i))
        item.meta.update(wait.meta)
        wait.replace_all_uses_with(item)
        graph.erase_node(wait)
        graph.erase_node(start)
    for node in (joined, waited):
        node.meta.update({k: first.meta[k] for k in ("backward", "constant", "itemsize", "dtype")})
        node.meta["module"] = block_of(first.meta["module"])
    transfers = [start.meta["transfer"] for start in starts]
    joined.meta["transfer"] = replace(
        transfers[0],
        num_bytes=sum(t.num_bytes for t in transfers),
        value=", ".join(t.value for t in transfers),
        module=joined.meta["module"],
    )


def _move_chain(start: fx.Node, target: fx.Node) -> None:
    """Put what a start depends on, all of it local, in front of another node."""
    chain, todo = [], list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and target < node:
            chain.append(node)
            todo.extend(node.all_input_nodes)
    for node in reversed(chain):
        target.prepend(node)
