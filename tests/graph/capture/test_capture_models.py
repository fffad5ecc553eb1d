"""Captured Hugging Face models compute what the eager models compute, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyperparallel.graph.capture.capture import capture
from tests.graph.capture.families import FAMILIES, seeded
from tests.graph.capture.joint import assert_equal_to_eager

pytestmark = pytest.mark.fake

CASES = [
    *((family, 5, {}) for family in FAMILIES if family != "gemma2"),
    ("gemma2", 2, {}),
    ("gpt2", 2, {"dropout": 0.3}),
    ("bert", 5, {"dropout": 0.3}),
    ("vit", 2, {"dropout": 0.3}),
    ("llama", 2, {"attention_dropout": 0.3}),
    ("llama", 2, {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "layers", "more"), CASES, ids=str)
def test_outputs_and_gradients_equal_eager(family: str, layers: int, more: dict[str, Any]) -> None:
    """In float64, with the same random numbers in dropout; five layers or more are stamped."""
    model, batch = seeded(family, layers, **more)
    model = model.double()
    batch = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    captured = capture(model, (), batch)
    result = assert_equal_to_eager(captured, model, (), batch, tolerance=1e-10)
    assert type(result) is type(model(**batch))
    trainable = [name for name, p in model.named_parameters() if p.grad is not None]
    assert list(captured.grads) == trainable
    assert list(captured.params) == [name for name, _ in model.named_parameters()]


def test_single_precision() -> None:
    model, batch = seeded("llama", 2)
    assert_equal_to_eager(capture(model, (), batch), model, (), batch, tolerance=1e-5)


def test_the_strict_tracer_finds_the_same_values() -> None:
    model, batch = seeded("llama", 1, tie_word_embeddings=True)
    captured = capture(model, (), batch, strict=True)
    assert_equal_to_eager(captured, model, (), batch)
    assert captured.param_aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_the_generation_cache_is_left_out() -> None:
    model, batch = seeded("llama", 1)
    assert model.config.use_cache
    captured = capture(model, (), batch)
    assert list(captured.outputs) == ["loss", "logits"]
    assert model.config.use_cache


def test_a_model_on_meta_is_captured_for_the_batch_device() -> None:
    _, batch = seeded("llama", 2)
    with torch.device("meta"):
        model, _ = seeded("llama", 2)
    graph = capture(model, (), batch).graph
    devices = {n.meta["val"].device.type for n in graph.nodes if hasattr(n.meta.get("val"), "device")}
    assert devices == {"cpu"}
    assert all(p.is_meta for p in model.parameters())


def test_the_forward_alone() -> None:
    model, batch = seeded("gpt2", 1, dropout=0.5)
    captured = capture(model, (), batch, train=False)
    assert not captured.grads and not captured.tangents
    assert model.training
    assert_equal_to_eager(captured, model.eval(), (), batch)
