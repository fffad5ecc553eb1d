"""Order a rank's program: start communication as early as it can, wait for it as late as nobody needs it.

A start moves to right behind what it needs; a wait to right before its first user. Gathers of parameters
need nothing but the parameter, so "as early as possible" would gather the whole model at once: at most
`prefetch` of them are under way ahead of their use, which is double buffering for 2.

Compute keeps its order. What memory allows beyond that is not weighed here.
"""

from __future__ import annotations

from collections import deque

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.program import RankProgram


def schedule(program: RankProgram, prefetch: int = 8) -> RankProgram:
    """Reorder the program's nodes in place; every rank gets the same order of collectives."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    waits = {n for n in nodes if n.target is communication.wait}
    starts = {n for n in nodes if n.target in communication.STARTS}
    early = {n for n in starts if _from_placeholder(n)}
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    upcoming = deque(n for n in nodes if n in early and not n.meta["constant"])
    in_flight: set[fx.Node] = set()
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
        while upcoming and len(in_flight) < prefetch:
            start = upcoming.popleft()
            if start not in placed:
                place(start)
                in_flight.add(start)
        if node not in waits:
            place(node)
    for node in nodes:
        place(node)
    _reorder(program.graph, order)
    return program


def _from_placeholder(start: fx.Node) -> bool:
    """Whether a start depends on placeholders alone, through local nodes that move no data to speak of."""
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node.op == "call_function":
            if node.target is communication.wait or len(node.all_input_nodes) != 1:
                return False
            todo.extend(node.all_input_nodes)
    return True


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
