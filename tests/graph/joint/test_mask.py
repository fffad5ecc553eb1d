"""Constant attention masks become `is_causal` or vanish; every other mask stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from hyperparallel.graph.capture.capture import Captured, capture
from tests.graph.capture.families import seeded
from tests.graph.capture.joint import assert_equal_to_eager

pytestmark = pytest.mark.fake
LENGTH = 6


class Attention(nn.Module):
    def __init__(self, mask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).view(x.shape[0], -1, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q.sin(), q.cos(), attn_mask=self.mask(x))


def grid() -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(LENGTH)
    return place[:, None], place[None, :]


def batched(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[0])[:, None, None, None]
    query, key = grid()
    return (key <= query)[None, None] & (rows >= 0)


MASKS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "causal": (lambda x: grid()[1] <= grid()[0], "causal"),
    "causal per batch": (batched, "causal"),
    "causal floats": (
        lambda x: torch.full((LENGTH, LENGTH), -torch.inf).triu(1),
        "causal",
    ),
    "nothing": (lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool), "none"),
    "zeros": (lambda x: torch.zeros(1, 1, LENGTH, LENGTH), "none"),
    "window": (lambda x: (grid()[1] <= grid()[0]) & (grid()[0] - grid()[1] < 3), "kept"),
    "wide window": (lambda x: (grid()[1] <= grid()[0]) & (grid()[0] - grid()[1] < 9), "causal"),
    "bias": (lambda x: -1.0 * (grid()[0] - grid()[1]).abs(), "kept"),
    "anti-causal": (lambda x: grid()[1] >= grid()[0], "kept"),
    "from the batch": (lambda x: (grid()[1] <= grid()[0]) & (x[0, 0, 0] < 1e9), "kept"),
}


def attention_ops(captured: Captured) -> list[fx.Node]:
    return [n for n in captured.graph.nodes if "scaled_dot_product" in str(n.target)]


def state(node: fx.Node) -> str:
    schema = node.target._schema  # type: ignore[union-attr]
    named = dict(zip([a.name for a in schema.arguments], node.args, strict=False))
    named.update(node.kwargs)
    if named.get("attn_mask") is not None:
        assert not named.get("is_causal", False)
        return "kept"
    return "causal" if named.get("is_causal") else "none"


@pytest.mark.parametrize("case", MASKS)
def test_masks(case: str) -> None:
    mask, wanted = MASKS[case]
    torch.manual_seed(0)
    net, x = Attention(mask), torch.randn(3, LENGTH, 8)
    captured = capture(net, (x,))
    found = attention_ops(captured)
    assert len(found) == 2 and {state(n) for n in found} == {wanted}
    assert_equal_to_eager(captured, net, (x,))


@pytest.mark.parametrize(
    ("family", "more", "wanted"),
    [
        ("llama", {}, {"causal"}),
        ("gpt2", {}, {"causal"}),
        ("mistral", {"sliding_window": 4}, {"kept"}),
        ("mistral", {"sliding_window": 40}, {"causal"}),
        ("bert", {}, {"kept"}),
        ("vit", {}, {"none"}),
    ],
)
def test_model_families(family: str, more: dict[str, Any], wanted: set[str]) -> None:
    model, batch = seeded(family, 2, **more)
    assert {state(n) for n in attention_ops(capture(model, (), batch))} == wanted


def test_cuda_ops_are_rewritten_alike() -> None:
    """The efficient attention op of CUDA takes its mask by position."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hyperparallel.graph.joint.mask import fold_masks

    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    graph = fx.Graph()
    q = graph.placeholder("q")
    with FakeTensorMode():
        q.meta["val"] = torch.empty(2, 2, LENGTH, 4)
        mask = graph.call_function(torch.ops.aten.full.default, ([LENGTH, LENGTH], -torch.inf))
        mask.meta["val"] = torch.empty(LENGTH, LENGTH)
        upper = graph.call_function(torch.ops.aten.triu.default, (mask, 1))
        upper.meta["val"] = torch.empty(LENGTH, LENGTH)
        wide = graph.call_function(torch.ops.aten.expand.default, (upper, [2, 2, LENGTH, LENGTH]))
        wide.meta["val"] = torch.empty(LENGTH, LENGTH).expand(2, 2, LENGTH, LENGTH)
    node = graph.call_function(op, (q, q, q, wide, True))
    graph.output(node)
    assert fold_masks(graph) == 1
    assert node.args == (q, q, q, None, True) and node.kwargs == {"is_causal": True}


def test_large_batches_cost_nothing() -> None:
    """A mask over (batch, 1, length, length) is computed once for all rows of the batch."""
    from hyperparallel.graph.joint import mask as masks

    net = Attention(batched)
    captured = capture(net, (torch.randn(100_000, LENGTH, 8, device="meta"),))
    assert {state(n) for n in attention_ops(captured)} == {"causal"}
    assert masks._LARGEST > 100_000 * LENGTH * LENGTH  # so the limit did not decide
