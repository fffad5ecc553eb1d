"""Order a rank's program: start communication as early as it can, wait for it as late as nobody needs it.

A start moves to right behind what it needs; a wait to right before its first user. Gathers of parameters
need nothing but the parameter, so "as early as possible" would gather the whole model at once: new ones
start while fewer than `prefetch` tensors are under way. Of a model whose blocks are gathered as one, the
next block is thus under way while one is computed with. What would be gathered again for the backward
while the forward still has it (the last block, the head) is not gathered again.

Compute keeps its order. What memory allows beyond that is not weighed here.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.coalesce import needs_parameters_only
from hyperparallel.graph.program import RankProgram


def schedule(program: RankProgram, prefetch: int = 8) -> RankProgram:
    """Reorder the program's nodes in place; every rank gets the same order of collectives."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    waits = {n for n in nodes if n.target is communication.wait}
    waits |= {n for n in nodes if n.target is operator.getitem and n.args[0] in waits}
    starts = {n for n in nodes if n.target in communication.STARTS}
    early = {n for n in starts if needs_parameters_only(n)}
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    erased: set[fx.Node] = set()
    upcoming = deque(n for n in nodes if n in early and not n.meta["constant"])
    in_flight: set[fx.Node] = set()
    latest: dict[Any, fx.Node] = {}
    followers = _followers(starts - early)

    def place(node: fx.Node) -> None:
        if node in placed:
            return
        for used in node.all_input_nodes:
            if used.op == "call_function":
                place(used)
        placed.add(node)
        order.append(node)
        in_flight.difference_update(node.all_input_nodes)
        for start in followers.get(node, ()):
            if all(n in placed or n.op == "placeholder" for n in start.all_input_nodes):
                place(start)

    for node in nodes:
        while upcoming and sum(map(_num_tensors, in_flight)) < prefetch:
            start = upcoming.popleft()
            before = latest.setdefault(_key(start), start)
            if program.joint and before is not start and not placed.issuperset(_readers(before)):
                erased |= _reuse(before, start)
            elif start not in placed:
                place(start)
                in_flight.add(start)
                latest[_key(start)] = start
        if node not in waits and node not in erased:
            place(node)
    for node in nodes:
        if node not in erased:
            place(node)
    _reorder(program.graph, order)
    return program


def _num_tensors(start: fx.Node) -> int:
    return len(start.args[0]) if isinstance(start.args[0], (list, tuple)) else 1


def _key(start: fx.Node) -> Any:
    """Equal for starts that gather the same pieces."""

    def plain(arg: Any) -> Any:
        return tuple(map(plain, arg)) if isinstance(arg, (list, tuple)) else arg

    return start.target, plain(start.args)


def _results(start: fx.Node) -> list[fx.Node]:
    """The nodes that give the gathered tensors, in the order of the start's list where it has one."""
    (wait,) = start.users
    if start.target not in communication.SINGLE:
        return [wait]
    return sorted(wait.users, key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]


def _readers(start: fx.Node) -> set[fx.Node]:
    return {user for result in _results(start) for user in result.users}


def _reuse(before: fx.Node, start: fx.Node) -> set[fx.Node]:
    """Let those who wait for `start` take what `before` gathers; returns the nodes that vanish."""
    old, new = _results(start), _results(before)
    (wait,) = start.users
    for mine, there in zip(old, new, strict=True):
        mine.replace_all_uses_with(there)
    gone = list(dict.fromkeys((*old, wait, start)))
    for node in gone:
        node.graph.erase_node(node)
    return set(gone)


def _followers(starts: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    followers: dict[fx.Node, list[fx.Node]] = {}
    for start in starts:
        for used in start.all_input_nodes:
            followers.setdefault(used, []).append(start)
    return {node: sorted(found) for node, found in followers.items()}


def _reorder(graph: fx.Graph, order: list[fx.Node]) -> None:
    last = [n for n in graph.nodes if n.op == "placeholder"]
    previous = last[-1] if last else graph._root
    for node in order:
        previous.append(node)
        previous = node
