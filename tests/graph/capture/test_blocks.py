"""Deep stacks: copies of traced blocks are what tracing them all gives, and doubts are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from hyperparallel.graph.capture import capture as capturing
from hyperparallel.graph.capture.batch_tree import call_tree
from hyperparallel.graph.capture.blocks import find_stacks
from hyperparallel.graph.capture.capture import Captured, capture
from hyperparallel.graph.capture.kept_blocks import reduce_stack
from hyperparallel.graph.capture.repeat_blocks import NotUniform
from tests.graph.capture.families import FAMILIES, seeded
from tests.graph.capture.joint import assert_equal_to_eager

pytestmark = pytest.mark.fake


def listing(captured: Captured) -> list[tuple[Any, ...]]:
    """Every node in order, arguments by position, so that only node names may differ."""
    place = {node: i for i, node in enumerate(captured.graph.nodes)}
    rows = []
    for node in captured.graph.nodes:
        args = fx.node.map_arg((node.args, node.kwargs), lambda x: f"%{place[x]}")
        module = (node.meta.get("custom") or {}).get("module")
        target = node.name if node.op == "placeholder" else str(node.target)
        rows.append((target, str(args), node.meta.get("block"), module, node.meta.get("role")))
    return rows


def shortened(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Capture with copied blocks or raise what speaks against it."""
    call, leaves = call_tree(module, args, kwargs)
    task = capturing._Task(module, call, leaves, True, False, None, find_stacks(module))
    reductions = [r for r in map(reduce_stack, task.stacks) if r is not None]
    assert reductions
    return task.run(False, reductions)


@pytest.mark.parametrize(("family", "layers"), [("llama", 7), ("gemma2", 10), ("bert", 6)])
def test_copied_blocks_equal_traced_ones(family: str, layers: int) -> None:
    """Node for node: ops, arguments, order, names, block marks, results."""
    more = {"dropout": 0.1} if family in ("gpt2", "bert") else {}
    model, batch = seeded(family, layers, **more)
    whole = capture(model, (), batch, shorten=False)
    short = shortened(model, (), batch)
    assert listing(short) == listing(whole)
    for field in ("params", "buffers", "inputs", "tangents", "results", "param_aliases"):
        assert getattr(short, field) == getattr(whole, field), field
        assert list(getattr(short, field)) == list(getattr(whole, field)), field


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma2"])
def test_repeats_share_local_names(family: str) -> None:
    model, batch = seeded(family, 3)
    kinds: dict[tuple[str, int], set[str]] = {}
    for kind, index, local in capture(model, (), batch).blocks.values():
        kinds.setdefault((kind, index), set()).add(local)
    (first, *rest) = kinds.values()
    assert len(rest) == 2 and len({kind for kind, _ in kinds}) == 1
    assert len(first) > 30 and all(len(names ^ first) <= 2 for names in rest)


class Block(nn.Module):
    def __init__(self, size: int, index: int = 0) -> None:
        super().__init__()
        self.layer_idx = index
        self.inner = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(self.inner(x)).tanh()
        return x + (y if bias is None else y * bias)


class Tower(nn.Module):
    """Blocks in a row; subclasses do something odd with them."""

    def __init__(self, depth: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, i) for i in range(depth))
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("bias", torch.rand(4))

    def forward(self, x: torch.Tensor) -> Any:
        x, bias = x * self.gain, self.bias + 1
        for block in self.blocks:
            x = block(x, bias)
        return x.sum()


class Shares(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x, self.gain)  # the last block starts its gradient, the others add to it
        return x.sum()


class Alternating(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x, self.bias if i % 2 else None)
        return x.sum()


class Late(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x) + (1 if i == 3 else 0)
        return x.sum()


class OneBias(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x, self.bias * 2 if i == 3 else self.bias)
        return x.sum()


class Collects(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        seen = [x := block(x) for block in self.blocks]
        return torch.stack(seen).sum()


class Skips(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = x if i == 3 else block(x)
        return x.sum()


class Twice(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x.sum()


class OneNone(Tower):
    def forward(self, x: torch.Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x, None if i == 3 else self.bias)
        return x.sum()


class UsesIndex(Tower):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = Indexed

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Indexed(Block):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.inner(x) / (2 if self.layer_idx == 3 else 1)


def equal(net: nn.Module, x: torch.Tensor) -> None:
    """Captured whichever way capture chooses, the module computes what it computes eagerly."""
    captured = capture(net, (x,))
    assert_equal_to_eager(captured, net, (x,), tolerance=1e-12)


def test_buffer_updates_in_copied_blocks() -> None:
    torch.manual_seed(0)
    net, x = Tower().double(), torch.randn(5, 4, dtype=torch.float64)
    whole, short = capture(net, (x,), shorten=False), shortened(net, (x,), {})
    assert listing(short) == listing(whole)
    assert "blocks.3.norm.running_var" in short.mutations
    equal(net, x)


def test_a_frozen_first_block_and_embedding() -> None:
    torch.manual_seed(0)
    net, x = Tower(9).double(), torch.randn(5, 4, dtype=torch.float64)
    net.gain.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    equal(net, x)


@pytest.mark.parametrize(
    "odd",
    [Alternating, Late, OneBias, Collects, OneNone, Shares, Skips, Twice, UsesIndex],
    ids=lambda c: c.__name__,
)
def test_odd_stacks_are_traced_whole(odd: type[Tower]) -> None:
    torch.manual_seed(0)
    net, x = odd().double(), torch.randn(5, 4, dtype=torch.float64)
    with pytest.raises((NotUniform, capturing.CaptureError)):
        shortened(net, (x,), {})
    equal(net, x)


def test_stacks_and_kinds() -> None:
    model, _ = seeded("gemma2", 6)
    (stack,) = find_stacks(model)
    assert stack.name == "model.layers" and stack.period == 2
    assert [stack.kind(i) for i in range(3)] == [f"model.layers:{i % 2}" for i in range(3)]
    shared = Tower(3)
    shared.blocks[2].inner.weight = shared.blocks[1].inner.weight
    assert find_stacks(shared) == []
    uneven = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 4))
    assert find_stacks(uneven) == []


@pytest.mark.parametrize("depth", range(4, 12))
def test_which_blocks_are_traced(depth: int) -> None:
    """The first, the last, and two in the middle of which one is odd and one even."""
    (stack,) = find_stacks(Tower(depth))
    reduction = reduce_stack(stack)
    if depth < 5:
        assert reduction is None
        return
    assert reduction is not None
    first, one, two, last = reduction.kept
    assert first == 0 and last == depth - 1 and first < one < two < last and (one + two) % 2
    assert len(reduction.dropped) == depth - 4
