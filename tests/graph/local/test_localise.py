"""Every rule is proved: cut operands, run the local form on virtual ranks, compare with the whole.

For every factor that a rule allows to cut: 2, 3 and 4 pieces (uneven, and empty where there are
more pieces than a ceil-sized chunk fills); every pair of factors at once; and for every linear
group, that summands in give summands out.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import rule_for
from tests.graph.local import cases_math, cases_shape
from tests.graph.local.op_case import Case
from tests.graph.local.virtual_op import OpRun

pytestmark = pytest.mark.fake
CASES = [*cases_math.cases(), *cases_shape.cases()]
assert len({case.name for case in CASES}) == len(CASES)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def prepared(case: Case) -> tuple[OpRun, Rule]:
    run = OpRun(case.target, case.args, case.kwargs)
    rule = rule_for(run.op, run.values)
    assert rule is not None, f"{run.op.target} has no rule"
    return run, rule


def free(rule: Rule) -> list[str]:
    """The factors that may be cut."""
    used = {f for side in (rule.inputs, rule.outputs) for d in side if d for dim in d for f in dim}
    assert used == set(rule.sizes), "sizes and factors differ"
    assert rule.blocked <= used
    kept = [{f for dim in d for f in dim} for d in rule.outputs if d is not None]
    inside = rule.inside or {}
    return [
        f
        for f in sorted(used - rule.blocked)
        if rule.reduce is not None or f in inside or all(f in there for there in kept)
    ]


def check(case: Case, run: OpRun, got: list[Any]) -> None:
    for i, (a, b) in enumerate(zip(got, run.results, strict=True)):
        if a is None or not isinstance(b, torch.Tensor):
            continue
        # Single precision only where a case casts from it: summands then do not add up exactly.
        single = any(x.dtype == torch.float32 for x in run.operands)
        tolerance = 0.0 if case.exact else 1e-6 if single else 1e-10
        torch.testing.assert_close(
            a,
            b,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, i=i: f"result {i}: {m}",
        )


@every_case
def test_one_cut_factor(case: Case) -> None:
    run, rule = prepared(case)
    for factor, n in itertools.product(free(rule), (2, 3, 4)):
        check(case, run, run.cut(rule, {factor: n}))


@every_case
def test_two_cut_factors(case: Case) -> None:
    run, rule = prepared(case)
    for a, b in itertools.combinations(free(rule), 2):
        check(case, run, run.cut(rule, {a: 2, b: 3}))


@every_case
def test_pending_sums_pass_through(case: Case) -> None:
    run, rule = prepared(case)
    for group in rule.linear:
        operands = list(run.operands)
        if any(operands[position].dtype == torch.bool for position in group):
            continue
        summands: list[list[torch.Tensor]] = [list(operands) for _ in range(3)]
        for position in group:
            x = operands[position]
            if x.is_floating_point() or x.is_complex():
                a, b = torch.rand(2, *x.shape, dtype=torch.float64).to(x.dtype)
                parts = [x * a, x * b, x - x * a - x * b]
            else:
                parts = [x - 2, torch.ones_like(x), torch.ones_like(x)]
            for summand, part in zip(summands, parts, strict=True):
                summand[position] = part
        results = [run.whole(summand) for summand in summands]
        sums = [
            sum(parts[1:], parts[0]) if isinstance(parts[0], torch.Tensor) else None
            for parts in zip(*results, strict=True)
        ]
        check(case, run, sums)
