"""Writing over dead operands never changes a value, an input, or what a collective still reads."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.inplace import reusable
from hyperparallel.layout import Layout
from hyperparallel.runtime.exec.codegen import compile_nodes
from hyperparallel.shard.spec import make_spec

pytestmark = pytest.mark.fake

aten = torch.ops.aten
SPEC = make_spec(Layout((1,), ("dp",)), [[(4, ())], [(4, ())]])
Call = Callable[..., fx.Node]


class Program:
    """Nodes over 4 x 4 matrices."""

    def __init__(self, num_inputs: int) -> None:
        self.graph, self.nodes = fx.Graph(), []
        self.origin = fx.Graph().placeholder("x")
        self.origin.meta["val"] = torch.zeros(4, 4)
        self.inputs = [self._noted(self.graph.placeholder(f"x{i}")) for i in range(num_inputs)]

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = self._noted(self.graph.call_function(target, args))
        self.nodes.append(node)
        return node

    def _noted(self, node: fx.Node) -> fx.Node:
        node.meta.update(spec=SPEC, origin=self.origin)
        return node


def _result_dies(p: Program, x: fx.Node) -> fx.Node:
    a = p(aten.mm.default, x, x)
    return p(aten.neg.default, p(aten.add.Tensor, a, x))


def _input(p: Program, x: fx.Node) -> fx.Node:
    return p(aten.neg.default, p(aten.add.Tensor, x, x))


def _view_of_input(p: Program, x: fx.Node) -> fx.Node:
    return p(aten.t.default, p(aten.mul.Tensor, p(aten.t.default, x), x))


def _read_later(p: Program, x: fx.Node) -> fx.Node:
    a = p(aten.mm.default, x, x)
    b = p(aten.add.Tensor, a, x)
    return p(aten.mm.default, a, b)


def _view_read_later(p: Program, x: fx.Node) -> fx.Node:
    a = p(aten.mm.default, x, x)
    turned = p(aten.t.default, a)
    b = p(aten.add.Tensor, a, x)
    return p(aten.mm.default, turned, b)


def _own_transpose(p: Program, x: fx.Node) -> fx.Node:
    a = p(aten.mm.default, x, x)
    return p(aten.mm.default, p(aten.add.Tensor, a, p(aten.t.default, a)), x)


def _under_way(p: Program, x: fx.Node) -> fx.Node:
    a = p(aten.mm.default, x, x)
    started = p(communication.all_reduce_start, a, "sum", ("dp",))
    b = p(aten.add.Tensor, a, x)
    return p(aten.mm.default, b, p(communication.wait, started))


def _reduced(p: Program, x: fx.Node) -> fx.Node:
    """The sum lies where its operand did, and what is computed from it may too."""
    a = p(aten.mm.default, x, x)
    total = p(communication.wait, p(communication.all_reduce_start, a, "sum", ("dp",)))
    return p(aten.mm.default, p(aten.add.Tensor, total, x), x)


def _reduced_view(p: Program, x: fx.Node) -> fx.Node:
    turned = p(aten.t.default, p(aten.mm.default, x, x))
    return p(communication.wait, p(communication.all_reduce_start, turned, "sum", ("dp",)))


def _reduced_and_read_later(p: Program, x: fx.Node) -> fx.Node:
    a = p(aten.mm.default, x, x)
    turned = p(aten.t.default, a)
    started = p(communication.all_reduce_start, a, "sum", ("dp",))
    return p(aten.mm.default, p(aten.t.default, turned), p(communication.wait, started))


def _reduced_input(p: Program, x: fx.Node) -> fx.Node:
    return p(communication.wait, p(communication.all_reduce_start, p(aten.t.default, x), "sum", ("dp",)))


def _reduced_twice(p: Program, x: fx.Node) -> fx.Node:
    """One memory cannot hold two results."""
    a = p(aten.mm.default, x, x)
    both = [a, p(aten.t.default, a)]
    return p(communication.wait, p(communication.all_reduce_many_start, both, "sum", ("dp",)))


def _repeated(p: Program, x: fx.Node) -> fx.Node:
    a = p(aten.expand.default, p(aten.mm.default, x, x), [4, 4])
    return p(aten.mm.default, p(aten.add.Tensor, a, x), x)


CASES: dict[str, tuple[Callable[[Program, fx.Node], fx.Node], int]] = {
    "a result that dies": (_result_dies, 2),
    "an input": (_input, 1),
    "a view of an input": (_view_of_input, 0),
    "a result read later": (_read_later, 0),
    "a result whose view is read later": (_view_read_later, 0),
    "a result read through a view by the same op": (_own_transpose, 0),
    "an operand of a started collective": (_under_way, 0),
    "an operand whose sum replaces it": (_reduced, 2),
    "a view whose sum replaces it": (_reduced_view, 1),
    "an operand that is read beside its sum": (_reduced_and_read_later, 0),
    "an input that is summed": (_reduced_input, 0),
    "two views of one memory that are summed": (_reduced_twice, 0),
    "elements that lie on one another": (_repeated, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_which_operands_are_written_over(name: str) -> None:
    write, expected = CASES[name]
    program = Program(1)
    result = write(program, program.inputs[0])
    assert len(reusable(program.nodes, program.inputs, [result])) == expected


def test_results_are_not_written_over() -> None:
    program = Program(1)
    a = program(aten.mm.default, program.inputs[0], program.inputs[0])
    b = program(aten.add.Tensor, program(aten.t.default, a), program.inputs[0])
    assert not reusable(program.nodes, program.inputs, [a, b])


OPS = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.mm.default, aten.addcmul.default)
VIEWS = (aten.t.default, aten.detach.default, aten.neg.default, aten.clone.default)


def _random_program(seed: int) -> tuple[Program, list[fx.Node]]:
    rng = random.Random(seed)
    program = Program(2)
    for _ in range(30):
        known = [*program.inputs, *program.nodes[-6:]]
        if rng.random() < 0.4:
            program(rng.choice(VIEWS), rng.choice(known))
        else:
            target = rng.choice(OPS)
            count = 3 if target is aten.addcmul.default else 2
            program(target, *(rng.choice(known) for _ in range(count)))
    return program, rng.sample(program.nodes, 3)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_keep_their_results(seed: int) -> None:
    program, results = _random_program(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(4, 4).mul(0.3) for _ in program.inputs]
    kept = [x.clone() for x in inputs]
    values: dict[fx.Node, Tensor] = dict(zip(program.inputs, inputs, strict=True))
    for node in program.nodes:
        values[node] = node.target(*(values[a] for a in node.args))  # type: ignore[operator, index]
    true = [values[node].clone() for node in results]
    function = compile_nodes(program.nodes, program.inputs, results, lambda axes: None)
    got = function(*inputs)
    for mine, other in zip(got, true, strict=True):  # a product may see other strides, so round otherwise
        torch.testing.assert_close(mine, other, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


def test_random_programs_do_write_over_operands() -> None:
    found = [reusable(p.nodes, p.inputs, r) for p, r in map(_random_program, range(40))]
    assert sum(map(len, found)) > 100


@pytest.mark.parametrize("takes_over", [False, True])
def test_what_a_program_takes_over_is_freed_after_its_last_use(takes_over: bool) -> None:
    program = Program(3)
    x, y, z = program.inputs
    first = program(aten.mm.default, x, y)
    result = program(aten.mm.default, program(aten.neg.default, first), z)
    given = [torch.eye(4) for _ in range(3)]
    watched, alive = [weakref.ref(t) for t in given], []
    function = compile_nodes(
        program.nodes, program.inputs, [result], lambda axes: None,
        mark=lambda: alive.append([w() is not None for w in watched]), takes_over=takes_over,
    )  # fmt: skip
    if takes_over:
        (got,) = function(given)
        assert not given
        assert alive == [[True] * 3, [False, False, True], [False, False, True], [False] * 3]
    else:
        (got,) = function(*given)
        assert all(map(all, alive))
    assert torch.equal(got, -torch.eye(4))
