"""The schedule's order of a rank's program."""

from __future__ import annotations

import torch
from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.schedule import schedule
from hyperparallel.graph.program import RankProgram

LENGTH = 1500


def test_a_chain_of_collectives_longer_than_pythons_stack_is_no_trouble() -> None:
    """Each sum follows at once from the one before: a model of 26 layers reached Python's limit."""
    graph = fx.Graph()
    value = graph.call_function(torch.neg, (graph.placeholder("x"),))
    for _ in range(LENGTH):
        start = graph.call_function(communication.all_reduce_start, (value, "sum", ("tp",)))
        value = graph.call_function(communication.wait, (start,))
    graph.output([value])
    for node in graph.nodes:
        node.meta.update(constant=False, backward=False)
    names = [node.name for node in graph.nodes]
    program = RankProgram(graph, 0, {}, {}, {"x": "x"}, {}, [("output", "y")], {}, {}, {})
    assert [node.name for node in schedule(program).graph.nodes] == names
    graph.lint()
