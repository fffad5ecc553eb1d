"""Cut a rank's program into what runs once, what runs in the forward and what in the backward.

Setup holds the nodes that depend on nothing that changes between steps (attention masks, rotary tables):
they run once per set of buffers. The forward ends where its results are made; what the backward needs of
it is handed over. For a loop that owns the whole step the two halves are one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from hyperparallel.graph.program import RankProgram


@dataclass(frozen=True)
class Stage:
    """Nodes in order, the nodes they read from outside, and the nodes they hand on."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Stages:
    """setup's outputs are inputs of the others; forward's outputs are results, then what is saved."""

    setup: Stage
    forward: Stage
    backward: Stage
    joint: Stage


def split_stages(program: RankProgram) -> Stages:
    """The stages of a program, dead nodes left out."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    by_name = {n.name: n for n in program.graph.nodes}
    first = [*program.outputs.values(), *program.mutations.values()]
    second = [*program.grads.values(), *program.input_grads.values()]
    live = _ancestors([*first, *second])
    # What is constant depends on constants alone, so setup reads nothing of a step.
    setup_nodes = [n for n in nodes if n in live and n.meta["constant"]]
    step_nodes = [n for n in nodes if n in live and not n.meta["constant"]]
    needed = _ancestors(first)
    tangents = {by_name[n] for n in program.tangents.values()}
    late = _descendants(tangents)
    # What results need runs in front even if torch tagged it backward; what needs a tangent runs behind.
    front = [n for n in step_nodes if n in needed or (not n.meta["backward"] and n not in late)]
    members = set(front)
    back = [n for n in step_nodes if n not in members]
    return Stages(
        setup=_stage(setup_nodes, _used_outside(setup_nodes, [*step_nodes], [*first, *second])),
        forward=_stage(front, [*first, *_used_outside(front, back, second)]),
        backward=_stage(back, second),
        joint=_stage(step_nodes, [*first, *second]),
    )


def _stage(nodes: list[fx.Node], outputs: Iterable[fx.Node]) -> Stage:
    inside, results = set(nodes), tuple(outputs)
    used = [u for n in nodes for u in n.all_input_nodes] + list(results)
    inputs = tuple(dict.fromkeys(n for n in used if n not in inside))
    return Stage(tuple(nodes), inputs, results)


def _used_outside(
    nodes: list[fx.Node], others: list[fx.Node], results: list[fx.Node]
) -> list[fx.Node]:
    inside = set(nodes)
    used = [u for n in others for u in n.all_input_nodes] + results
    # Each once, in the order of use, which is the same on every rank (a set's is not).
    return list(dict.fromkeys(n for n in used if n in inside))


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return _reached(nodes, lambda node: node.all_input_nodes)


def _descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return _reached(nodes, lambda node: node.users)


def _reached(
    nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(neighbours(node))
    return found
