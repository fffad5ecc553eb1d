"""The solver against brute force, and what it finds on small programs with known answers."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from hyperparallel.cluster import Rates
from hyperparallel.errors import PlanError
from hyperparallel.shard.axis_states import WHOLE, AxisState, Choice, Cut, choices, conversion_seconds
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import rule_for
from hyperparallel.shard.solve_axis import AxisTask, Progress, _AxisProgram, solve_axis
from hyperparallel.workload import Op, Ref, Value, Workload

pytestmark = pytest.mark.pure
RATES = Rates(
    flops_per_second=1e9,
    memory_bytes_per_second=1e9,
    link_bytes_per_second=1e8,
    latency_seconds=1e-6,
)


def op(name: str, target: str, *inputs: str) -> Op:
    return Op(name, target, tuple(map(Ref, inputs)), {}, inputs, (name,))


def program(ops: list[Op], shapes: dict[str, tuple[int, ...]], outputs: list[str]) -> Workload:
    values = {name: Value(name, shape, "float32", 4) for name, shape in shapes.items()}
    made = {o.name for o in ops}
    inputs = {name: name for name in shapes if name not in made}
    return Workload(tuple(ops), values, {}, {}, inputs, {o: o for o in outputs}, {})


def brute_force(work: Workload, rules: dict[str, Rule], task: AxisTask) -> float:
    """The least cost over every combination of choices and source placements, by definition."""
    pricing = _AxisProgram(work, rules, task, Progress(), RATES)
    options = [choices(rules[o.name], {}, task.size) for o in work.ops]
    sources = list(task.sources)
    best = float("inf")
    for picked in itertools.product(*options):
        for places in itertools.product(*(task.sources[s] for s in sources)):
            made = dict(zip(sources, places, strict=True))
            best = min(best, _cost(work, rules, task, pricing, picked, made))
    return best


def _cost(
    work: Workload,
    rules: dict[str, Rule],
    task: AxisTask,
    pricing: _AxisProgram,
    picked: tuple[Choice, ...],
    made: dict[str, AxisState],
) -> float:
    cost = 0.0
    wanted: set[tuple[str, AxisState]] = set()
    for o, choice in zip(work.ops, picked, strict=True):
        cost += pricing._op_seconds(o, rules[o.name], choice)
        wanted.update(zip(o.inputs, choice.inputs, strict=True))
        made[o.name] = choice.outputs[0]
    for value, sink in task.sinks.items():
        wanted.add((value, sink[0]))
    for value, place in wanted:
        size = work.values[value].num_bytes
        cost += conversion_seconds(made[value], place, size, task.size, task.name, RATES)
    return cost


def random_program(seed: int) -> tuple[Workload, AxisTask]:
    """A few matmuls, sums and pointwise ops on 8 x 8 tensors, all of them used."""
    draw = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {f"x{i}": (8, 8) for i in range(3)}
    ops = []
    for i in range(5):
        first, second = draw.choices(list(shapes), k=2)
        target = draw.choice(["aten.mm.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.exp.default"])
        names = (first,) if "exp" in target else (first, second)
        shapes[f"v{i}"] = (8, 8)
        ops.append(op(f"v{i}", target, *names))
    work = program(ops, shapes, ["v4"])
    places = (WHOLE, Cut(0, 8), Cut(1, 8))
    sources = {f"x{i}": tuple(draw.sample(places, k=draw.choice([1, 2]))) for i in range(3)}
    return work, AxisTask("tp", 2, sources, {"v4": (draw.choice(places),)})


@pytest.mark.parametrize("seed", range(12))
def test_cost_is_the_least_there_is(seed: int) -> None:
    work, task = random_program(seed)
    rules = {o.name: rule_for(o, work.values) for o in work.ops}
    decision = solve_axis(work, rules, task, Progress(), RATES)
    assert decision.seconds == pytest.approx(brute_force(work, rules, task), rel=1e-3)


def test_the_decision_costs_what_it_says() -> None:
    work, task = random_program(3)
    rules = {o.name: rule_for(o, work.values) for o in work.ops}
    decision = solve_axis(work, rules, task, Progress(), RATES)
    pricing = _AxisProgram(work, rules, task, Progress(), RATES)
    picked = tuple(decision.ops[o.name] for o in work.ops)
    assert decision.seconds == pytest.approx(
        _cost(work, rules, task, pricing, picked, dict(decision.sources)), rel=1e-3
    )


def test_two_matmuls_become_column_then_row() -> None:
    """Megatron's pair: the first weight cut on its output, the second on its input, one reduction."""
    shapes = {"x": (64, 32), "w1": (32, 128), "w2": (128, 32), "h": (64, 128), "y": (64, 32)}
    work = program(
        [op("h", "aten.mm.default", "x", "w1"), op("y", "aten.mm.default", "h", "w2")], shapes, ["y"]
    )
    rules = {o.name: rule_for(o, work.values) for o in work.ops}
    free = (WHOLE, Cut(0, 128), Cut(1, 32))
    task = AxisTask(
        "tp", 4, {"x": (WHOLE,), "w1": (Cut(1, 128),), "w2": free}, {"y": (WHOLE,)}
    )
    decision = solve_axis(work, rules, task, Progress(), RATES)
    assert decision.sources["w2"] == Cut(0, 128)
    assert str(decision.ops["y"].outputs[0]) == "pending sum"


def test_parameters_of_one_op_choose_apart_in_a_block_too() -> None:
    """A product of two parameters: a is cut by columns, b by rows, whether or not the op is of a block."""
    shapes = {"a": (64, 64), "b": (64, 64), "y": (64, 64)}
    free = (WHOLE, Cut(0, 64), Cut(1, 64))
    update = {"a": 1e9, "b": 1e9}
    task = AxisTask("tp", 4, {"a": free, "b": free}, {"y": (WHOLE,)}, update_bytes=update)
    found = []
    for block in (None, ("layer", 0, "y")):
        one = dataclasses.replace(op("y", "aten.mm.default", "a", "b"), block=block)
        work = program([one], shapes, ["y"])
        rules = {"y": rule_for(one, work.values)}
        found.append(solve_axis(work, rules, task, Progress(), RATES))
    assert found[1].seconds == found[0].seconds
    assert dict(found[1].sources) == {"a": Cut(1, 64), "b": Cut(0, 64)}


def test_a_program_that_is_not_decided_in_time_names_its_axis() -> None:
    work, task = random_program(0)
    rules = {o.name: rule_for(o, work.values) for o in work.ops}
    with pytest.raises(PlanError, match=r"mesh axis tp: got 5 ops: .*; allowed: .* within 0 s .*layouts for"):
        solve_axis(work, rules, task, Progress(), RATES, seconds=0.0)
