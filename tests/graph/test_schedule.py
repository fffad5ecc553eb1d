"""The schedule's order of a rank's program."""

from __future__ import annotations

import inspect
import sys

from hyperparallel.graph.passes.schedule import schedule
from hyperparallel.graph.pipeline import build
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from tests.graph import families


def test_a_chain_of_collectives_longer_than_pythons_stack_is_no_trouble() -> None:
    """A model of 26 layers reached Python's limit from inside a test, where frames stand below."""
    model, batch = families.seeded("llama", 2)
    mesh = Layout((2, 2), ("dp", "tp"))
    plan = Plan(mesh, {"*.gate_proj.weight": mesh("tp", None)}, fsdp="dp")
    program = build(model, plan, (), batch, rank_passes=()).rank_program(0)
    before = {str(node) for node in program.graph.nodes}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 40)
    try:
        schedule(program)
    finally:
        sys.setrecursionlimit(limit)
    assert {str(node) for node in program.graph.nodes} <= before
    program.graph.lint()
