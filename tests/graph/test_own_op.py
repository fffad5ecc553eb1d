"""An op of the user's own, registered in one place (rule, facts, local form): all who ask see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from hyperparallel.cluster import Rates
from hyperparallel.errors import UserError
from hyperparallel.graph.local.local_op import LocalOp
from hyperparallel.graph.local.localise import localise, register_local_form
from hyperparallel.graph.passes.inplace import reusable
from hyperparallel.graph.predict.instructions import _touched, kind_of
from hyperparallel.layout import Layout
from hyperparallel.plan.decide import _looks
from hyperparallel.runtime.exec.codegen import compile_nodes
from hyperparallel.shard.axis_states import Choice, choices
from hyperparallel.shard.batchwise import over_rows
from hyperparallel.shard.op_seconds import op_seconds
from hyperparallel.shard.own_rule import register_rule
from hyperparallel.shard.rules.rule import OpFacts
from hyperparallel.shard.rules.table import facts_of, rule_for
from hyperparallel.shard.solve_axis import AxisTask, Progress, solve_axis
from hyperparallel.shard.spec import make_spec
from hyperparallel.workload import Op, Ref, Value, Workload

pytestmark = pytest.mark.fake
RATES = Rates(flops_per_second=1e9, memory_bytes_per_second=1e9, link_bytes_per_second=1e8)
SHAPES = {"x": (6, 4), "w": (4,), "y": (6, 4)}
VALUES = {name: Value(name, shape, "float32", 4) for name, shape in SHAPES.items()}
NAMES = ("scaled(Tensor x, Tensor w) -> Tensor", "scaled_(Tensor(a!) x, Tensor w) -> Tensor(a!)",
         "look(Tensor x) -> Tensor", "drawn(Tensor x) -> Tensor",
         "penalty(Tensor x, Tensor y, int reduction=1) -> Tensor")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[Any]:
    """The user's file: ops, and beside each its rule, facts and local form."""
    library = torch.library.Library("ownlib", "FRAGMENT")
    for name in NAMES:
        library.define(name)
    for name, function in (("scaled", lambda x, w: x * w), ("scaled_", lambda x, w: x.mul_(w)),
                           ("look", lambda x: x.clone()), ("drawn", lambda x: x + 1),
                           ("penalty", lambda x, y, reduction=1: ((x - y) ** 2).mean())):  # fmt: skip
        library.impl(name, function, "CompositeExplicitAutograd")
    register_rule("ownlib.scaled", "b d, d -> b d", linear=((0,), (1,)), flops=100.0, orderless=True,
                  fresh=True, in_place=(0,), looks_up=True, group="scaling")  # fmt: skip
    register_local_form("ownlib.scaled", twice_the_weight)
    register_rule("ownlib.look", "b d -> b d", linear=((0,),), view=True)
    register_rule("ownlib.drawn", "b d -> b d", random=True)
    register_rule("ownlib.penalty", "b d, b d -> ", reduction_at=2)
    yield torch.ops.ownlib
    library._destroy()


def twice_the_weight(local: LocalOp) -> tuple[Any, ...]:
    return local.call((local.args[0], local.emit(torch.add, local.args[1], local.args[1])))


def op(name: str, *inputs: str, out: str = "y", args: tuple[Any, ...] = ()) -> Op:
    return Op(out, f"ownlib.{name}.default", (*map(Ref, inputs), *args), {}, inputs, (out,))


def test_it_is_priced_by_its_facts() -> None:
    one = op("scaled", "x", "w")
    rule = rule_for(one, VALUES)
    assert rule is not None
    num_bytes = {name: float(value.num_bytes) for name, value in VALUES.items()}
    whole, *cut = choices(rule, {}, 2)
    seconds = [op_seconds(one, rule, c, {}, num_bytes, "dp", 2, RATES) for c in (whole, *cut)]
    assert seconds[0] == pytest.approx(100 * 24 / 1e9)
    by_rows = next(s for s, c in zip(seconds[1:], cut, strict=True) if c.factor is not None)
    assert by_rows == pytest.approx(100 * 12 / 1e9)
    look = op("look", "x")
    rule = rule_for(look, VALUES)
    assert rule is not None
    assert op_seconds(look, rule, choices(rule, {}, 2)[0], {}, num_bytes, "dp", 2, RATES) == 0.0


@pytest.mark.parametrize(("scored", "exchanges"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_exchanges_inside_are_priced_by_its_facts(scored: bool, exchanges: int) -> None:
    register_rule("ownlib.norm", "b d -> b d", scored=scored, exchanges=exchanges, view=False)
    one, rates = op("norm", "x"), dataclasses.replace(RATES, latency_seconds=1.0)
    rule = rule_for(one, VALUES)
    assert rule is not None
    place = choices(rule, {}, 2)[0]
    sent = Choice(place.inputs, place.outputs, None, inside_fraction=1.0)
    num_bytes = {name: float(value.num_bytes) for name, value in VALUES.items()}
    plain, more = (op_seconds(one, rule, c, {}, num_bytes, "dp", 2, rates) for c in (place, sent))
    expected = exchanges * (0.25 if scored else 1.0) + 96 / 1e8  # the bytes are those of all of them
    assert more - plain == pytest.approx(expected)


def test_a_factor_may_be_cut_inside_where_order_does_not_matter() -> None:
    """8 rows seen as (2, 4) by a view: only an op that does not mind which rows it gets keeps them so cut."""

    def seconds(name: str) -> float:
        shapes = {"x": (2, 4), "r": (8,), "w": (), "y": (8,)}
        values = {n: Value(n, shape, "float32", 4) for n, shape in shapes.items()}
        view = Op("r", "aten.view.default", (Ref("x"), (8,)), {}, ("x",), ("r",))
        last = Op("y", f"ownlib.{name}.default", (Ref("r"),), {}, ("r",), ("y",))
        work = Workload((view, last), values, {}, {}, {"x": "x"}, {"y": "y"}, {})
        rules = {o.name: rule_for(o, values) for o in work.ops}
        inner = choices(rules["r"], {}, 2)  # type: ignore[arg-type]
        cut = next(c for c in inner if c.factor is not None and getattr(c.inputs[0], "dim", 0) == 1)
        task = AxisTask("tp", 2, {"x": (cut.inputs[0],)}, {"y": (cut.outputs[0],)})  # type: ignore[dict-item]
        return solve_axis(work, rules, task, Progress(), RATES).seconds  # type: ignore[arg-type]

    register_rule("ownlib.any_order", "n -> n", orderless=True)
    register_rule("ownlib.one_order", "n -> n")
    assert seconds("any_order") < seconds("one_order")


def test_what_it_draws_keeps_its_place_and_what_it_looks_at_is_the_same() -> None:
    assert facts_of("ownlib.drawn.default").random and not facts_of("ownlib.scaled.default").random
    work = Workload((op("look", "x"),), VALUES, {"x": "x"}, {}, {}, {}, {})
    assert _looks(work, "x") == {"x", "y"}


@pytest.mark.parametrize(("reduction", "expected"), [(1, "mean"), (2, "sum")])
def test_a_loss_says_how_it_is_reduced(reduction: int, expected: str) -> None:
    values = {name: Value(name, (6, 4) if name != "y" else (), "float32", 4) for name in ("x", "t", "y")}
    loss = op("penalty", "x", "t", args=(reduction,))
    rule = rule_for(loss, values)
    assert rule is not None
    work = Workload((loss,), values, {}, {}, {"x": "x", "t": "t"}, {"y": "y"}, {})
    assert over_rows(work, {"y": rule}, "y") == expected


def test_its_timeline_group_and_what_it_reads(ops: Any) -> None:
    assert kind_of(ops.scaled.default) == "scaling"
    read = [torch.zeros(100), torch.zeros(3)]
    assert _touched(ops.scaled.default, read) == read[1:] and _touched(ops.drawn.default, read) == read


def test_its_local_form_is_called(ops: Any) -> None:
    one = op("scaled", "x", "w")
    rule = rule_for(one, VALUES)
    assert rule is not None

    def emit(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    x, w = torch.rand(6, 4), torch.rand(4)
    local = LocalOp(one, rule, ops.scaled.default, (x, w), {}, {}, emit, lambda *a: None)
    torch.testing.assert_close(localise(local)[0], x * 2 * w)


def test_it_is_written_over_its_dead_operand_and_may_be_written_over(ops: Any) -> None:
    spec = make_spec(Layout((1,), ("dp",)), [[(4, ())], [(4, ())]])
    graph, origin = fx.Graph(), fx.Graph().placeholder("x")
    origin.meta["val"] = torch.zeros(4, 4)
    aten = torch.ops.aten

    def noted(node: fx.Node) -> fx.Node:
        node.meta.update(spec=spec, origin=origin)
        return node

    x, w = (noted(graph.placeholder(name)) for name in "xw")
    made = noted(graph.call_function(aten.mm.default, (x, x)))
    scaled = noted(graph.call_function(ops.scaled.default, (made, w)))
    done = noted(graph.call_function(aten.neg.default, (scaled,)))
    nodes = [made, scaled, done]
    assert reusable(nodes, [x, w], [done]) == {scaled: 0, done: 0}
    compiled = compile_nodes(nodes, [x, w], [done], lambda axes: None)
    a, b = torch.rand(4, 4), torch.rand(4, 4)
    torch.testing.assert_close(compiled(a, b)[0], -(a @ a) * b)
    assert ops.scaled_.default in compiled.__globals__.values()


def test_a_fact_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r"got 'flop'.*write flops instead"):
        register_rule("ownlib.wrong", "b -> b", flop=2.0)
    assert facts_of("ownlib.nobody.default") == OpFacts()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda local: None, "NoneType None; allowed: a tuple of 1"),
        (lambda local: [local.call()], "a tuple of 1"),
        (lambda local: local.call() * 2, "a tuple of 1"),
        (lambda local: 1 // 0, "ZeroDivisionError"),
        (lambda local: (torch.ones(3),), "each returned by local.emit"),
    ],
)
def test_a_local_form_that_returns_something_else_is_refused_with_the_ops_name(form: Any, words: str) -> None:
    register_local_form("ownlib.look", form)
    graph = fx.Graph()
    op = Op("look", "ownlib.look.default", (Ref("x"),), {}, ("x",), ("y",))
    rule = rule_for(op, VALUES)
    assert rule is not None
    local = LocalOp(op, rule, torch.ops.ownlib.look.default, (graph.placeholder("x"),), {}, {},
                    lambda fn, *args: graph.call_function(fn, args), None)  # fmt: skip
    with pytest.raises(UserError, match=rf"local form of ownlib\.look: got.*{words}"):
        localise(local)
    register_local_form("ownlib.look", lambda local: local.call())
    assert isinstance(localise(local)[0], fx.Node)


def test_what_is_no_form_or_no_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"local form of ownlib\.look: got 3"):
        register_local_form("ownlib.look", 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r'target.*write "ownlib\.look" instead'):
        register_local_form("ownlib::look", lambda local: local.call())
