"""One collective for the parameters of a block, and one for its gradients, where they are cut alike.

Gathers over the same axes that need nothing but parameters, and reductions whose results nothing in the
program waits for, go together if they belong to one block and phase: as many bytes in a few messages.
A block is what stands under one number in the model's names, one layer of a stack; what stands outside
of blocks (embedding, head) stays alone, so that it is not gathered long before it is used.

The collective takes all tensors with their dims and sizes; whether they are packed is the transport's
business. Placed where the first gather, or the last reduction, stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.pairs import is_fetch, is_handed_out, join_starts
from hyperparallel.graph.program import RankProgram

JOINED = (communication.all_gather_start, communication.reduce_scatter_start)


def coalesce(program: RankProgram) -> RankProgram:
    """Join what goes together, in place; every rank joins the same starts."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if not _joinable(node):
            continue
        phase = not program.joint and node.meta["backward"]
        # The gathers of zero=3 for the backward are joined apart: else parameters would stay for them.
        again = node.target is communication.all_gather_start and node.meta["backward"]
        block = block_of(node.meta["module"])
        # Equal axes, and for reductions an equal op: what follows dim and sizes in the arguments.
        key = (node.target, node.args[3:], node.meta["dtype"], phase, again, block)
        groups.setdefault(key, []).append(node)
    for starts in groups.values():
        if len(starts) > 1:
            _join(program.graph, starts)
    return program


def _join(graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
    """Gathers go where the first stood, reductions where the last did."""
    first, place = starts[0], starts[-1]
    if first.target is communication.all_gather_start:
        place = first
        for start in starts[1:]:
            _move_chain(start, first)
    join_starts(graph, starts, place, block_of(first.meta["module"]))


def block_of(module: str) -> str:
    """The path of the block that a module lies in, "" where it lies in none.

    >>> block_of("model.layers.3.mlp.down_proj"), block_of("lm_head")
    ('model.layers.3', '')
    """
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _joinable(node: fx.Node) -> bool:
    if node.target not in JOINED or node.meta["constant"] or "dtype" not in node.meta:
        return False
    # The embedding and the head have no block of parameters to travel with.
    if not block_of(node.meta["module"]):
        return False
    if node.target is communication.all_gather_start:
        return is_fetch(node)
    return is_handed_out(node)


def _move_chain(start: fx.Node, target: fx.Node) -> None:
    """Put what a start depends on, all of it local, in front of another node."""
    chain, todo = [], list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        # `<` is the order of the program: what stands in front of the target already may stay there.
        if node.op == "call_function" and target < node:
            chain.append(node)
            todo.extend(node.all_input_nodes)
    for node in reversed(chain):
        target.prepend(node)
