"""What optimizers do, and when memory was last touched, counted in cases that can be done by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyperparallel.graph.predict.reuse import with_reuse
from hyperparallel.graph.predict.update_work import UpdateWork, update_work
from hyperparallel.workload.instruction import Instruction

pytestmark = pytest.mark.fake
SGD, ADAM = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("optimizer", "names", "tensors"),
    [
        (lambda named: SGD(named, lr=0.1, foreach=False), ["add_"], 2),
        (lambda named: SGD(named, lr=0.1, momentum=0.9, foreach=False), ["mul_", "add_", "add_"], 3),
        (lambda named: ADAM(named, lr=0.1, fused=True), ["_fused_adamw_"], 4),
    ],
)
def test_calls_of_an_update(optimizer: Callable[..., Any], names: list[str], tensors: int) -> None:
    found = update_work(optimizer)
    assert found.tensors == tensors
    assert [name for name, accesses in found.calls if accesses] == names


def test_a_fused_update_touches_what_its_formula_says() -> None:
    """Parameter and two moments are read and written, the gradient is read (and written, says its schema)."""
    found = update_work(lambda named: ADAM(named, lr=0.1, fused=True))
    assert sum(accesses for _, accesses in found.calls) == 8
    looped = update_work(lambda named: ADAM(named, lr=0.1, foreach=False))
    assert isinstance(looped, UpdateWork) and sum(accesses for _, accesses in looped.calls) > 15


def test_distances_count_what_was_touched_in_between() -> None:
    """y = x + x; z = y * w; u = z + x, of 400 bytes each."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_function(torch.add, (x, x))
    z = graph.call_function(torch.mul, (y, w))
    u = graph.call_function(torch.add, (z, x))
    made = {node: torch.zeros(100) for node in (x, w, y, z, u)}
    ops = [Instruction(node.name, "elementwise", num_bytes=1.0) for node in (y, z, u)]
    first, second, third = (one.reuse for one in with_reuse(ops, [y, z, u], made))
    assert sorted(first) == [(math.inf, 400)] * 2  # x, and new memory for y
    assert sorted(second) == [(800.0, 400), (math.inf, 400), (math.inf, 400)]  # y was just made
    # z was just made; x was touched by the first op; u takes over the memory of y, dead since the second.
    assert sorted(third) == [(1200.0, 400), (1200.0, 400), (2000.0, 400)]


@pytest.mark.parametrize(
    ("lookup", "args"),
    [
        (torch.ops.aten.embedding.default, lambda table, index: (table, index)),
        (torch.ops.aten.gather.default, lambda table, index: (table, 0, index)),
    ],
)
def test_of_a_table_only_the_rows_looked_up_are_touched(lookup: Any, args: Callable[..., Any]) -> None:
    """y = look(table, i); z = y + y: what is read for y is as much as y, and far away."""
    graph = torch.fx.Graph()
    table, index = graph.placeholder("table"), graph.placeholder("index")
    y = graph.call_function(lookup, args(table, index))
    z = graph.call_function(torch.add, (y, y))
    made = {table: torch.zeros(1000), index: torch.zeros(5, dtype=torch.int64), y: torch.zeros(5)}
    made[z] = torch.zeros(5)
    ops = [Instruction(node.name, "elementwise", num_bytes=1.0) for node in (y, z)]
    first, second = (one.reuse for one in with_reuse(ops, [y, z], made))
    assert sorted(first) == [(math.inf, 20), (math.inf, 20), (math.inf, 40)]  # rows, y, index
    assert min(second) == (80.0, 20)  # y: behind the 80 bytes of its own op
