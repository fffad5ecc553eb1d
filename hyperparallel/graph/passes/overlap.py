"""Order a rank's program: start communication as early as it can, wait for it as late as nobody needs it.

A start moves to right behind what it needs; a wait to right before its first user. Gathers of parameters
need nothing but the parameter, so "as early as possible" would gather the whole model at once: at most
`prefetch` of them are under way ahead of their use, or one of those that gather a whole block: the next
block is under way while one is computed with. What would be gathered again for the backward
while the forward still has it (the last block, the head) is not gathered again.

Compute keeps its order. What memory allows beyond that is not weighed here.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.pairs import needs_parameters_only, origin, results_of
from hyperparallel.graph.program import RankProgram


def overlap(program: RankProgram, prefetch: int = 8) -> RankProgram:
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
    latest: dict[Any, fx.Node] = {}  # what was gathered last -> its result
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
            if all(n in placed or n.op == "placeholder" for n in map(origin, start.all_input_nodes)):
                place(start)

    for node in nodes:
        while upcoming and _has_room(in_flight, prefetch):
            start = upcoming.popleft()
            if start in placed:
                continue
            there = [latest.get(item) for item in _items(start)]
            if program.joint and all(x is not None and not placed.issuperset(_readers(x)) for x in there):
                erased |= _reuse(there, start)
                continue
            place(start)
            in_flight.add(start)
            latest.update(zip(_items(start), results_of(start), strict=True))
        if node not in waits and node not in erased:
            place(node)
    for node in nodes:
        if node not in erased:
            place(node)
    _reorder(program.graph, order)
    return program


def _has_room(in_flight: set[fx.Node], prefetch: int) -> bool:
    return len(in_flight) < prefetch and not any(n.target in communication.SINGLE for n in in_flight)


def _items(start: fx.Node) -> list[Any]:
    """What a start gathers, by tensor: equal for equal pieces over equal axes."""
    one = communication.SINGLE.get(start.target, start.target)
    parts = communication.STARTS[start.target].singles(start.args)
    return [(one, *(tuple(arg) if isinstance(arg, list) else arg for arg in own)) for own in parts]


def _readers(result: fx.Node) -> set[fx.Node]:
    """The users of all that was gathered together with a result."""
    together = result.args[0].users if result.target is operator.getitem else [result]  # type: ignore[union-attr]
    return {user for each in together for user in each.users}


def _reuse(there: Sequence[Any], start: fx.Node) -> set[fx.Node]:
    """Let the users of what `start` gathers take what is there; returns the nodes that vanish."""
    (wait,) = start.users
    results = results_of(start)
    for mine, other in zip(results, there, strict=True):
        mine.replace_all_uses_with(other)
    gone = list(dict.fromkeys((*results, wait, start)))
    for node in gone:
        node.graph.erase_node(node)
    return set(gone)


def _followers(starts: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    followers: dict[fx.Node, list[fx.Node]] = {}
    for start in starts:
        for used in map(origin, start.all_input_nodes):
            followers.setdefault(used, []).append(start)
    return {node: sorted(found) for node, found in followers.items()}


def _reorder(graph: fx.Graph, order: list[fx.Node]) -> None:
    last = [n for n in graph.nodes if n.op == "placeholder"]
    previous = last[-1] if last else graph._root
    for node in order:
        previous.append(node)
        previous = node
