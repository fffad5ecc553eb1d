"""Parts of a joint graph compute what the whole graph computes, whatever the model looks like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.shard.block import Block
from hyperparallel.graph.build import captured_model
from hyperparallel.graph.capture.capture import Captured
from hyperparallel.graph.passes.split import EDGE, PartCut, split_parts
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from tests.graph.capture import families
from tests.models import SIZE, plain_decoder, token_batches
from tests.runtime.module import small
from tests.runtime.module.small import made, numbers

pytestmark = [pytest.mark.fake, pytest.mark.timeout(110)]
PLAN = Plan(Mesh((1,), ("dp",)))
Values = dict[tuple[str, str], Tensor]
"""(role, name) -> value, of what a graph takes or returns."""


def run(captured: Captured, values: Values) -> Values:
    """One run of a joint graph; what it takes from another part and is not there yet is zero."""
    given = []
    for node in captured.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        zeros = torch.zeros(fake.shape, dtype=fake.dtype)
        given.append(values.get(node.meta["role"], zeros))
    return dict(zip(captured.results, captured.graph_module(*given), strict=True))


def run_parts(cut: PartCut, values: Values) -> Values:
    """All parts again and again until everything has crossed; results of the last round."""
    known, found = dict(values), {}
    for _ in range(2 * len(cut.parts) + 1):
        for part in cut.parts:
            for (role, name), x in run(part, known).items():
                if name.startswith(EDGE):
                    known["input" if role == "output" else "tangent", name] = x
                else:
                    found[role, name] = x
    return found


def values_of(model: nn.Module, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    values = {("param", n): p.detach() for n, p in model.named_parameters()}
    values |= {("buffer", n): b for n, b in model.named_buffers()}
    leaves = captured.flatten_inputs(args, kwargs)
    values |= {("input", path): x for path, x in zip(captured.inputs, leaves, strict=True)}
    return values | {("tangent", path): torch.ones((), dtype=torch.float64) for path in captured.tangents}


class Deep(nn.Module):
    """Six equal blocks: four are traced, two are copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(SIZE) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Thin(nn.Module):
    """Six equal blocks that are fast to capture."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep().double()


X = (torch.randn(4, SIZE.sequence, SIZE.model_dim, dtype=torch.float64),)
IDS = (token_batches(1)[0],)
CASES: dict[str, tuple[Any, Any, list[list[str]]]] = {
    "decoder": (plain_decoder, IDS, [["embed", "blocks.0"], ["blocks.1", "head"]]),
    "in a block": (plain_decoder, IDS, [["embed", "blocks.0", "blocks.1.attention*"], ["blocks.1", "head"]]),
    "three parts": (plain_decoder, IDS, [["embed"], ["blocks"], ["head"]]),
    "copied blocks": (deep, X, [["layers.0", "layers.1"], ["layers.2"], ["layers.[345]"]]),
    "blocks without a pattern": (lambda: made(Thin), (numbers(3, 4),), [["layers.0"], ["layers.2"]]),
    "adapters": (lambda: made(small.Lora), (numbers(5, 8),), [["*.0", "*.1"], ["*.2", "*.3"]]),
    "a weight of both": (lambda: made(small.Tied), (small.integers(7, 4, 3),), [["embed"], ["head"]]),
    "buffers that change": (lambda: made(small.Batch), (numbers(6, 4),), [["linear"], ["norm"]]),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_compute_what_the_whole_computes(name: str) -> None:
    make, args, patterns = CASES[name]
    model = make(torch.float64) if make is plain_decoder else make()
    captured = captured_model(model, PLAN, args, loss="")
    cut = split_parts(captured, patterns)
    assert len(cut.parts) == len(patterns) and cut.crossings
    values = values_of(model, captured, args, {})
    whole, parts = run(captured, values), run_parts(cut, values)
    assert set(whole) == set(parts)
    for what, x in whole.items():
        torch.testing.assert_close(parts[what], x, rtol=1e-12, atol=1e-14, msg=str(what))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_hugging_face_model_splits_by_its_layers(family: str) -> None:
    """Rotary tables and masks are the model's own code, and made again where they are read."""
    model, batch = families.seeded(family, 2, tie_word_embeddings=False)
    captured = captured_model(model.double(), PLAN, (), batch, loss="loss")
    front = ["model.embed_tokens", "model.layers.0"]
    cut = split_parts(captured, [front, ["model.layers.1", "model.norm", "lm_head"]])
    assert len(cut.crossings) == 2, "one activation and its gradient"
    values = values_of(model, captured, (), batch)
    values["tangent", "loss"] = torch.ones((), dtype=torch.float32)  # transformers sums in float32
    whole, parts = run(captured, values), run_parts(cut, values)
    for what, x in whole.items():
        torch.testing.assert_close(parts[what], x, rtol=1e-12, atol=1e-14, msg=str(what))


def test_every_op_is_in_one_part_but_what_depends_on_the_batch_alone() -> None:
    captured = captured_model(plain_decoder(torch.float64), PLAN, IDS, loss="")
    cut = split_parts(captured, CASES["decoder"][2])

    def ops(graph: Any) -> set[str]:
        return {node.name for node in graph.nodes if node.op == "call_function"}

    first, second = (ops(part.graph) for part in cut.parts)
    assert first | second == ops(captured.graph) and not first & second
    assert [set(part.params) for part in cut.parts] == [
        {n for n in captured.params if n.startswith(("embed", "blocks.0"))},
        {n for n in captured.params if n.startswith(("head", "blocks.1"))},
    ]


def test_what_no_pattern_names_stays_in_one_piece() -> None:
    """Copied blocks share torch's numbers; the backward of each goes with its own forward."""
    captured = captured_model(made(Thin), PLAN, (numbers(3, 4),), loss="")
    cut = split_parts(captured, [["layers.0"], ["layers.2"]])
    assert [(c.source, c.target, c.backward) for c in cut.crossings] == [(0, 1, False), (1, 0, True)]
    blocks = [sorted({name.split(".")[1] for name in part.params}) for part in cut.parts]
    assert blocks == [["0", "1"], ["2", "3", "4", "5"]]
