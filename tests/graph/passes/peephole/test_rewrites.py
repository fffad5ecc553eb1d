"""Each local rewrite alone: the call it replaces is gone, its own is there, and values stay.

What is gone is seen on one rank, where nothing moves. Values are those of forward and backward, in
float64, against the plain module, on one rank and on three virtual ranks whose pieces of the batch are
2, 2 and 0 rows; unequal nodes on the ranks would fail the lockstep run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import hyperparallel as hp
from benchmarks.shard.block import rotate
from hyperparallel.graph.build import build
from hyperparallel.graph.passes.peephole import sweeps as peephole
from hyperparallel.graph.passes.peephole.rewrite import Rewriter, RewriteTable, calls
from hyperparallel.graph.program import RankProgram
from hyperparallel.runtime.module.certify import certify_built
from tests.graph.passes.peephole.unrewritten import results, same_bits, with_passes

pytestmark = pytest.mark.fake

aten = torch.ops.aten
BATCH, SEQUENCE, WIDTH = 4, 6, 8
TOLERANCE = 1e-12
"""float64, relative to the largest element: rounding of sums and products in another order."""


class Case(nn.Module):
    """A function of an input and a square weight, with rotary tables at hand."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())
        self.scale = nn.Parameter(torch.rand(WIDTH).double() + 0.5)
        cos, sin = torch.rand(2, SEQUENCE, WIDTH)  # unlike real tables, of two different halves
        for name, value in (("cos", cos), ("sin", sin)):
            self.register_buffer(name, value.double())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self)


def _padded(x: Tensor, m: Case) -> Tensor:
    y, shape = x * m.scale, list(x.shape)
    low = aten.slice_backward(y[..., 4:], shape, 2, 0, 4, 1)
    return low + x + aten.slice_backward(y[..., :4].neg(), shape, 2, 4, 8, 1)


def _overlapping(x: Tensor, m: Case) -> Tensor:
    y, shape = x * m.scale, list(x.shape)
    return aten.slice_backward(y[..., 3:], shape, 2, 0, 5, 1) + aten.slice_backward(
        y[..., :4], shape, 2, 4, 8, 1
    )


def _many(x: Tensor, m: Case) -> Tensor:
    """The slices of `_padded` among two other terms; no gradient is padded."""
    v, w, shape = x[..., 4:] * m.weight[0, 0], x[..., :4] * m.weight[0, 0], list(x.shape)
    low = x + aten.slice_backward(v, shape, 2, 0, 4, 1) + x.exp()
    return low + aten.slice_backward(w, shape, 2, 4, 8, 1)


def _rotate(x: Tensor, m: Case) -> Tensor:
    return rotate(x * m.scale, m.cos, m.sin).pow(2)


@dataclass(frozen=True)
class Rule:
    """What a table does to a function: the targets that go, and those that come."""

    function: Callable[[Tensor, Case], Tensor]
    tables: Sequence[RewriteTable]
    gone: tuple[Any, ...] = ()
    made: tuple[Any, ...] = ()
    fewer: tuple[Any, ...] = ()


RULES = {
    "padded slices": Rule(_padded, [peephole.SLICES], (aten.slice_backward.default,), (aten.cat.default,)),
    "sum of products": Rule(
        lambda x, m: linear(x, m.weight) + linear(x * m.scale, m.weight.t()),
        [peephole.SUMS],
        (),
        (aten.addmm.default,),
        (aten.mm.default,),
    ),
    "multiply and add": Rule(
        lambda x, m: x + (x * m.scale) * x, [peephole.SUMS], (), (aten.addcmul.default,)
    ),
    "mean and number": Rule(
        lambda x, m: (x * m.scale).mean(-1, keepdim=True) + 1e-6,
        [peephole.SUMS],
        (aten.mean.dim,),
        (aten.sum.dim_IntList,),
    ),
    "square": Rule(
        lambda x, m: (x * m.scale).pow(2), [peephole.SCALARS], (), (), (aten.pow.Tensor_Scalar,)
    ),
    "numbers as constants": Rule(
        lambda x, m: (x * m.scale) * 0.3 + 1.5,
        [peephole.SCALARS],
        (),
        (aten.full.default,),
    ),
    "rotary": Rule(
        _rotate, [peephole.SLICES, peephole.ROTARY], (aten.slice_backward.default,), (aten.roll.default,)
    ),
}


def _counts(program: RankProgram) -> dict[Any, int]:
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    return {target: targets.count(target) for target in targets}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_rewrite(name: str, num_ranks: int) -> None:
    rule = RULES[name]
    counts: list[tuple[dict[Any, int], dict[Any, int]]] = []

    def sweep(program: RankProgram) -> RankProgram:
        before, rewriter = _counts(program), Rewriter(program)
        for table in rule.tables:
            rewriter.sweep(table)
        program.graph.lint()
        counts.append((before, _counts(program)))
        return program

    module = Case(rule.function)
    x = torch.randn(BATCH, SEQUENCE, WIDTH).double()
    mesh = hp.Layout((num_ranks,), ("dp",))
    plan = hp.Plan(mesh, inputs={"x": mesh("dp", None, None)})
    built = build(module, plan, (), {"x": x}, joint_passes=(), rank_passes=(sweep,))
    certificate = certify_built(module, built, (), {"x": x})
    assert certificate.holds(TOLERANCE), str(certificate)
    before, after = counts[0]
    if num_ranks == 1:
        assert all(before.get(t) and not after.get(t) for t in rule.gone), (before, after)
        assert all(after.get(t) for t in rule.made), after
        assert all(after.get(t, 0) < before[t] for t in rule.fewer), (before, after)


EXACT = [name for name, rule in RULES.items() if rule.tables[0] is not peephole.SUMS]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_rewrite_keeps_every_bit(name: str, kind: torch.dtype) -> None:
    rule = RULES[name]

    def sweep(program: RankProgram) -> RankProgram:
        rewriter = Rewriter(program)
        for table in rule.tables:
            assert all(rewrite.exact for rewrites in table.values() for rewrite in rewrites)
            rewriter.sweep(table)
        return program

    model, batch = Case(rule.function).to(kind), {"x": torch.randn(BATCH, SEQUENCE, WIDTH).to(kind)}
    mesh = hp.Layout((3,), ("dp",))
    built = build(model, hp.Plan(mesh, inputs={"x": mesh("dp", None, None)}), (), batch)
    plain = results(model, with_passes(built, ()), batch)
    assert same_bits(results(model, with_passes(built, (sweep,)), batch), plain)


def _program(function: Callable[[Tensor, Case], Tensor], kind: torch.dtype) -> RankProgram:
    module = Case(function).to(kind)
    x = torch.randn(BATCH, SEQUENCE, WIDTH).to(kind)
    return build(module, hp.Plan(hp.Layout((1,), ("dp",))), (), {"x": x}, rank_passes=()).rank_program(0)


@pytest.mark.parametrize("function", [_overlapping, _many])
def test_slices_stay_that_overlap_or_are_added_among_others(function: Any) -> None:
    """Of two other terms, one would be added before the slices that it came after."""
    program = _program(function, torch.float64)
    before = _counts(program)[aten.slice_backward.default]
    after = _counts(peephole.peephole(program))[aten.slice_backward.default]
    assert after == before >= 2


def test_numbers_stay_where_a_tensor_would_round_them() -> None:
    """bfloat16 kernels multiply by the number in float32; as a tensor it would be rounded first."""
    program = peephole.peephole(_program(lambda x, m: x * m.scale * 0.3, torch.bfloat16))
    assert aten.full.default not in _counts(program)


def test_constants_depend_on_constants_only() -> None:
    program = peephole.peephole(_program(_rotate, torch.float32))
    constants = [n for n in program.graph.nodes if n.meta.get("constant")]
    assert any(calls(n, aten.cat.default) for n in constants)
    assert all(used.meta["constant"] for n in constants for used in n.all_input_nodes)
