"""Rules as values: the notation, the table, views as factors.

What the rules claim is proved in `tests/graph/local/test_localise.py`.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperparallel.errors import UserError
from hyperparallel.shard.own_rule import register_rule
from hyperparallel.shard.rules.notation import bind, parse, write
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import facts_of, rule_for
from hyperparallel.shard.rules.views import factorise
from hyperparallel.workload import Op, Ref, Value

pytestmark = pytest.mark.pure


def rule_of(target: str, *operands: object, out: tuple[int, ...], dtype: str = "float32") -> Rule:
    """The rule of an op; tuples among the operands are tensors' shapes, lists plain arguments."""
    values = {"out": Value("out", out, dtype, 4)}
    args: list[object] = []
    for i, operand in enumerate(operands):
        if isinstance(operand, tuple):
            values[f"x{i}"] = Value(f"x{i}", operand, dtype, 4)
            args.append(Ref(f"x{i}"))
        else:
            args.append(tuple(operand) if isinstance(operand, list) else operand)
    inputs = tuple(a.name for a in args if isinstance(a, Ref))
    rule = rule_for(Op("op", target, tuple(args), {}, inputs, ("out",)), values)
    assert rule is not None
    return rule


@pytest.mark.parametrize(
    ("target", "operands", "out", "text"),
    [
        ("aten.mm.default", ((8, 4), (4, 6)), (8, 6), "m k, k n -> m n"),
        ("aten.view.default", ((2, 16, 64), [32, 64]), (32, 64), "a b c -> (a b) c"),
        ("aten.view.default", ((3, 8), [4, 6]), (4, 6), "[a] ([b] e) -> [c] ([d] e)"),
        ("aten.add.Tensor", ((8, 1), (4,)), (8, 4), "a 1, b -> a b"),
        ("aten.sum.dim_IntList", ((8, 4), [1], True), (8, 1), "a b -> a 1"),
        ("aten.slice.Tensor", ((4, 12), 1, 4, 8), (4, 4), "a ([part] b) -> a b"),
        ("aten.slice.Tensor", ((4, 12), 1, 4, 9), (4, 5), "a [from] -> a [to]"),
        ("aten.transpose.int", ((2, 3, 4), 1, 2), (2, 4, 3), "a b c -> a c b"),
        ("aten.embedding.default", ((7, 5), (4, 3)), (4, 3, 5), "v d, i0 i1 -> i0 i1 d"),
        ("aten.cumsum.default", ((4, 5), 1), (4, 5), "a [b] -> a [b]"),
        ("aten.expand.default", ((1, 5), [3, 5]), (3, 5), "1 b -> c b"),
        ("aten.add_.Tensor", ((8,), (8,)), (8,), "a, a -> a"),
    ],
)
def test_a_rule_reads_as_expected(
    target: str, operands: tuple[object, ...], out: tuple[int, ...], text: str
) -> None:
    assert write(rule_of(target, *operands, out=out)) == text


@pytest.mark.parametrize(
    ("target", "operands", "linear"),
    [
        ("aten.add.Tensor", ((8,), (8,)), ((0, 1),)),
        ("aten.add.Tensor", ((8,), 10), ()),
        ("aten.add.Tensor", ((8,), 0), ((0,),)),
        ("aten.mul.Tensor", ((8,), (8,)), ((0,), (1,))),
        ("aten.mul.Tensor", ((8,), 2.0), ((0,),)),
        ("aten.div.Tensor", ((8,), (8,)), ((0,),)),
        ("aten.clamp.default", ((8,), 0), ()),
        ("aten.relu.default", ((8,),), ()),
        ("aten.where.self", ((8,), (8,), (8,)), ((1, 2),)),
        ("aten.pow.Tensor_Scalar", ((8,), 2), ()),
        ("aten.silu_backward.default", ((8,), (8,)), ((0,),)),
    ],
)
def test_which_operands_let_a_pending_sum_through(
    target: str, operands: tuple[object, ...], linear: tuple[tuple[int, ...], ...]
) -> None:
    assert rule_of(target, *operands, out=(8,)).linear == linear


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), max_size=4).map(tuple)


@given(SHAPES, st.randoms(use_true_random=False))
def test_a_view_moves_every_free_factor_to_the_same_elements(
    shape: tuple[int, ...], random: object
) -> None:
    """Cutting a free factor selects the same flat indices before and after the view."""
    count = math.prod(shape)
    target, left = [], count
    while left > 1:
        divisors = [d for d in range(2, left + 1) if left % d == 0]
        target.append(random.choice(divisors))  # type: ignore[attr-defined]
        left //= target[-1]
    rule = factorise(shape, tuple(target))
    assert rule.outputs[0] is not None
    for dims, sizes in ((rule.inputs[0], shape), (rule.outputs[0], tuple(target))):
        assert tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims) == sizes
    for factor in set(rule.sizes) - rule.blocked:
        assert _flat(rule.inputs[0], rule, factor) == _flat(rule.outputs[0], rule, factor)


def _flat(dims: tuple[tuple[str, ...], ...], rule: Rule, factor: str) -> tuple[int, int]:
    """(stride, size) of a factor in the flat index: which digit of it the factor is."""
    order = [f for dim in dims for f in dim]
    inner = order[order.index(factor) + 1 :]
    return math.prod(rule.sizes[f] for f in inner), rule.sizes[factor]


@given(SHAPES, SHAPES)
def test_a_view_to_a_merged_shape_blocks_nothing(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    shape = a + b
    merged = (math.prod(a), math.prod(b))
    assert not factorise(shape, merged).blocked
    assert not factorise(merged, shape).blocked


@pytest.mark.parametrize(
    "text", ["b k k o", "b (k -> b", "b [k -> b", "b k] -> b", "b + k -> b", "b ... -> b"]
)
def test_a_notation_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="notation"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("b k, k o -> b o", [(8, 4)], [(8, 6)]),
        ("b k, k o -> b o", [(8, 4), (5, 6)], [(8, 6)]),
        ("b k, k o -> b o", [(8, 4, 1), (4, 6)], [(8, 6)]),
        ("(b s) -> b s t", [(8,)], [(2, 4, 1)]),
    ],
)
def test_shapes_that_do_not_fit_a_notation_are_refused(
    text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]
) -> None:
    if text.startswith("("):
        assert bind(parse(text), inputs, outputs).sizes == {"b": 2, "s": 4}
        return
    with pytest.raises(UserError, match="notation"):
        bind(parse(text), inputs, outputs)


def test_a_written_rule_parses_to_the_same_factors() -> None:
    rule = rule_of("aten.view.default", (3, 8, 5), [4, 6, 5], out=(4, 6, 5))
    again = bind(parse(write(rule)), [(3, 8, 5)], [(4, 6, 5)], sizes=dict(rule.sizes))
    assert (again.inputs, again.outputs, again.blocked) == (rule.inputs, rule.outputs, rule.blocked)


def test_dots_stand_for_any_leading_dims_and_broadcast() -> None:
    rule = bind(parse("... k, k o -> ... o"), [(2, 3, 4), (4, 6)], [(2, 3, 6)])
    assert write(rule) == ".0 .1 k, k o -> .0 .1 o"
    broadcast = bind(parse("... k, ... k -> ..."), [(2, 3, 4), (1, 4)], [(2, 3)])
    assert write(broadcast) == ".0 .1 k, 1 k -> .0 .1"


def test_a_user_registers_a_rule_in_one_string() -> None:
    assert rule_for(Op("y", "testlib.rotate.default", (), {}, (), ("y",)), {}) is None
    register_rule("testlib.rotate", "b [s] d -> b [s] d", linear=((0,),))
    rule = rule_of("testlib.rotate.default", (2, 5, 4), out=(2, 5, 4))
    assert rule.blocked == {"s"} and rule.linear == ((0,),)


def test_a_later_rule_reaches_overloads_that_were_asked_for_before() -> None:
    register_rule("testlib.twice", "b s -> b s")
    assert not rule_of("testlib.twice.default", (4, 6), out=(4, 6)).blocked
    register_rule("testlib.twice", "b [s] -> b [s]")
    assert rule_of("testlib.twice.default", (4, 6), out=(4, 6)).blocked == {"s"}


@pytest.mark.parametrize("given", [{"linear": ((0,),)}, {"reduce": "max"}, {"linear": ()}])
def test_what_a_function_says_itself_is_not_taken_beside_it(given: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"testlib\.thrice: got a function; allowed: linear and reduce"):
        register_rule("testlib.thrice", lambda op, values: None, **given)  # type: ignore[arg-type]
    assert rule_for(Op("y", "testlib.thrice.default", (), {}, (), ("y",)), {}) is None


def test_random_ops_are_known() -> None:
    for name in ("native_dropout.default", "bernoulli.p", "bernoulli_.float", "rand.default"):
        assert facts_of(f"aten.{name}").random, name
    assert not facts_of("aten.mul.Tensor").random


@pytest.mark.alone
def test_a_rule_costs_microseconds() -> None:
    """Thousands of ops are looked up: 50 us each, on a machine that may be busy."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            rule_of("aten.view.default", (2, 16, 64), [32, 64], out=(32, 64))
            rule_of("aten.mm.default", (32, 64), (64, 16), out=(32, 16))
            rule_of("aten.add.Tensor", (32, 64), (64,), out=(32, 64))
        rounds.append((time.perf_counter() - start) / 300)
    assert min(rounds) < 50e-6, [f"{a:.1e}" for a in rounds]
    assert all(a > 0 for a, _ in pairwise(rounds))


def test_rules_do_not_import_torch() -> None:
    code = "import sys, hyperparallel.shard.rules.table; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
