"""Tidying changes no value: bit for bit, and never across random ops."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hyperparallel.graph.joint.tidy import tidy_graph

pytestmark = pytest.mark.fake
aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6) - 7


def traced(function: Callable[..., object]) -> fx.GraphModule:
    with FakeTensorMode():
        fake = torch.empty_strided(X.shape, X.stride())
        return make_fx(function, tracing_mode="fake")(fake)


def targets(module: fx.GraphModule) -> list[object]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


CASES: dict[str, tuple[Callable[[torch.Tensor], object], list[object]]] = {
    "two transposes": (lambda x: aten.t(aten.t(x)) + 1, [aten.add.Tensor]),
    "there and back": (lambda x: x.view(24).view(4, 6) + 1, [aten.add.Tensor]),
    "view of view": (lambda x: x.view(2, 12).view(3, 8) + 1, [aten.view.default, aten.add.Tensor]),
    "detach and alias": (lambda x: aten.alias(x.detach()) + 1, [aten.add.Tensor]),
    "same copy": (lambda x: x.clone().to(torch.float32, copy=True) + 1, [aten.add.Tensor]),
    "whole slice": (lambda x: x[0:4].expand(4, 6) + 1, [aten.add.Tensor]),
    "ones": (lambda x: (x * 1.0 / 1) ** 1 + 1, [aten.add.Tensor]),
    "squeeze back": (lambda x: x.unsqueeze(1).squeeze(1) + 1, [aten.add.Tensor]),
    "twice": (lambda x: x.sin() * x.sin(), [aten.sin.default, aten.mul.Tensor]),
    "unused": (lambda x: (x.cos(), x + 1)[1], [aten.add.Tensor]),
    "split": (
        lambda x: x.split(2)[0] + x.split(2)[0],
        [aten.split.Tensor, operator.getitem, aten.add.Tensor],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_removed(case: str) -> None:
    function, left = CASES[case]
    module = traced(function)
    tidy_graph(module.graph)
    module.recompile()
    assert targets(module) == left
    assert torch.equal(module(X), function(X))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.native_dropout(x, 0.5, True)[0] + aten.native_dropout(x, 0.5, True)[0],
        lambda x: x.t().clone(memory_format=torch.contiguous_format).view(24),
        lambda x: x.t().contiguous().view(24).view(6, 4),
        lambda x: x.double() + x.float(),
        lambda x: (x + 0.0, x * -1),
        lambda x: (x * 2, x * 2.0, torch.full((2,), 1), torch.full((2,), 1.0)),
        lambda x: (torch.full((2,), 0.0), torch.full((2,), -0.0)),
        lambda x: x.expand(2, 4, 6).clone().view(8, 6),
        lambda x: (x.t().t(), x[:, 1:].t(), x[1:, 0]),
        lambda x: x.clamp(None, 3),
    ],
)
def test_what_must_stay_right(function: Callable[[torch.Tensor], object]) -> None:
    module = traced(function)
    torch.manual_seed(0)
    before = module(X)
    tidy_graph(module.graph)
    module.recompile()
    torch.manual_seed(0)
    after = module(X)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    signs = [torch.signbit(x) for x in after] if isinstance(after, tuple) else []
    assert all(map(torch.equal, signs, [torch.signbit(x) for x in before]))


def test_random_ops_stay_even_if_unused() -> None:
    """Removing one would give the next op other random numbers."""

    def function(x: torch.Tensor) -> torch.Tensor:
        aten.native_dropout(x, 0.5, True)
        return aten.native_dropout(x, 0.5, True)[0]

    module = traced(function)
    tidy_graph(module.graph)
    assert targets(module).count(aten.native_dropout.default) == 2


def test_a_node_merged_from_two_blocks_belongs_to_neither() -> None:
    module = traced(lambda x: x.sin() + x.sin() + x.cos())
    one, two = (n for n in module.graph.nodes if n.target is aten.sin.default)
    one.meta["block"], two.meta["block"] = ("blocks", 0, "sin"), ("blocks", 1, "sin")
    (cos,) = (n for n in module.graph.nodes if n.target is aten.cos.default)
    cos.meta["block"] = ("blocks", 1, "cos")
    tidy_graph(module.graph)
    assert "block" not in one.meta and cos.meta["block"] == ("blocks", 1, "cos")


def test_tidying_twice_changes_nothing() -> None:
    module = traced(lambda x: (x.view(2, 12).view(3, 8).sin() * 1.0).t().t())
    tidy_graph(module.graph)
    once = str(module.graph)
    tidy_graph(module.graph)
    assert str(module.graph) == once
