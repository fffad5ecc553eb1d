"""Rules found by trying an op: right where there is one, else whole with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hyperparallel.graph import probe as probing
from hyperparallel.graph.probe import probe
from hyperparallel.shard.rules.notation import write
from hyperparallel.shard.rules.rule import Rule
from tests.graph.local.op_case import bools, ints, r
from tests.graph.local.virtual_op import OpRun

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    probing._KNOWN.clear()
    probing._WARNED.clear()
    yield


def found(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[OpRun, Rule]:
    run = OpRun(fn, args, kwargs)
    return run, probe(run.op, run.values, fn)


def outer_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsk,ok->bso", a, b)


def rotated(x: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * angle.cos(), x.flip(-1) * angle.sin()


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def argmax_of_rows(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


@pytest.mark.parametrize(
    ("fn", "operands", "text"),
    [
        (outer_sum, (r(4, 6, 5), r(7, 5)), "c b a, d a -> c b d"),
        (rotated, (r(4, 6), r(4, 1)), "a [i0_1], a 1 -> a [o0_1], a [o1_1]"),
        (centred, (r(4, 6, 7),), "a b [i0_2] -> a b [o0_2]"),
        (argmax_of_rows, (r(4, 6),), "a [i0_1] -> a"),
    ],
)
def test_a_rule_is_found(
    fn: Callable[..., Any], operands: tuple[torch.Tensor, ...], text: str
) -> None:
    run, rule = found(fn, *operands)
    named = write(rule)
    assert _renamed(named) == _renamed(text)
    for factor in set(rule.sizes) - rule.blocked:
        for n in (2, 3):
            for got, want in zip(run.cut(rule, {factor: n}), run.results, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def _renamed(text: str) -> str:
    """The notation with its factors renamed in order of appearance."""
    names: dict[str, str] = {}
    out = []
    for token in text.replace(",", " , ").replace("[", " [ ").replace("]", " ] ").split():
        if token not in (",", "->", "[", "]", "1"):
            token = names.setdefault(token, f"f{len(names)}")
        out.append(token)
    return " ".join(out)


def test_operands_in_which_the_op_is_linear_are_found() -> None:
    _, rule = found(outer_sum, r(4, 6, 5), r(7, 5))
    assert rule.linear == ((0,), (1,))
    assert found(torch.exp, r(4))[1].linear == ()


@pytest.mark.parametrize("function", [torch.relu, torch.abs, torch.nn.functional.leaky_relu])
def test_what_is_linear_on_parts_of_one_sign_only_is_not_linear(function: Callable[..., Any]) -> None:
    """Summands that ranks have not added up yet may have any sign: relu(1) + relu(-1) is not relu(0)."""
    assert found(function, r(4, 6))[1].linear == ()


def test_one_warning_names_the_op_where_nothing_can_be_cut() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0).flip(1) + x.mean()

    with pytest.warns(UserWarning, match=r"mixed.*register_rule"):
        _, rule = found(mixed, r(4, 6))
    assert rule.blocked == set(rule.sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found(mixed, r(4, 7))


def test_an_op_that_draws_numbers_is_never_cut() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    with pytest.warns(UserWarning, match="noisy"):
        _, rule = found(noisy, r(4, 6))
    assert rule.blocked == set(rule.sizes)


def test_the_random_state_is_left_alone() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    run = OpRun(noisy, (r(4, 6),), {})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning):
        probe(run.op, run.values, noisy)
    assert torch.equal(before, torch.get_rng_state())


def test_integers_and_truth_values() -> None:
    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(1)

    _, rule = found(counted, ints(9, 5, 7), bools(5, 7))
    assert len(set(rule.sizes) - rule.blocked) == 2
    assert rule.outputs[0] is not None and len(rule.outputs[0]) == 1


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.ops.aten.diagonal.default, (r(5, 5, 3),)),
        (torch.ops.aten.unfold.default, (r(4, 9), 1, 3, 2)),
        (torch.ops.aten.renorm.default, (r(4, 6), 2, 0, 1.0)),
        (torch.ops.aten.glu.default, (r(5, 8), 1)),
        (torch.ops.aten.trace.default, (r(5, 5),)),
        (torch.ops.aten.searchsorted.Tensor, (r(9).sort().values, r(4, 6))),
    ],
)
def test_ops_beside_the_table_are_right_however_they_are_cut(
    target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    run = OpRun(target, args, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rule = probe(run.op, run.values, target)
    for factor in set(rule.sizes) - rule.blocked:
        for got, want in zip(run.cut(rule, {factor: 2}), run.results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_custom_op_is_probed_by_its_own_kernel() -> None:
    @torch.library.custom_op("hp_test::scaled_rows", mutates_args=())
    def scaled_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale[:, None]

    target = torch.ops.hp_test.scaled_rows.default
    run, rule = found(target, r(5, 7), r(5))
    assert _renamed(write(rule)) == _renamed("a b, a -> a b")
    torch.testing.assert_close(run.cut(rule, {rule.inputs[1][0][0]: 3})[0], run.results[0])
