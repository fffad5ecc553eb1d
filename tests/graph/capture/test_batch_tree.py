"""Nested batches: paths, rebuilding, registered types."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from hyperparallel.graph.capture.batch_tree import call_tree, flatten

pytestmark = pytest.mark.fake

LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.builds(lambda: torch.zeros(1)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x is y
    if isinstance(x, dict):
        return type(x) is type(y) and list(x) == list(y) and all(same(x[k], y[k]) for k in x)
    if isinstance(x, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    return type(x) is type(y) and bool(x == y)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_rebuilding_is_the_inverse_of_flattening(obj: Any) -> None:
    tree, leaves = flatten(obj)
    assert len(list(tree.paths())) == len(leaves)
    assert same(tree.rebuild(iter(leaves)), obj)


def test_model_outputs_and_ordered_dicts() -> None:
    x = torch.zeros(2)
    tree, leaves = flatten(CausalLMOutputWithPast(loss=x, logits=x))
    assert list(tree.paths()) == ["loss", "logits"] and leaves == [x, x]
    result = tree.rebuild(iter([1, 2]))
    assert isinstance(result, CausalLMOutputWithPast) and result.to_tuple() == (1, 2)
    tree, _ = flatten(OrderedDict(a=x))
    assert type(tree.rebuild(iter([1]))) is OrderedDict
    tree, _ = flatten(defaultdict(list, a=x))
    made = tree.rebuild(iter([1]))
    assert made == {"a": 1} and made["b"] == []


def test_unknown_objects_become_none() -> None:
    tree, leaves = flatten((torch.zeros(1), object()))
    assert tree.rebuild(iter(leaves)) == (leaves[0], None)


def test_calls_with_any_signature() -> None:
    class Net(nn.Module):
        def forward(self, a: Any, /, b: Any, *rest: Any, c: Any = None, **more: Any) -> Any:
            return a, b, rest, c, more

    x, y, z, w = (torch.full((), float(i)) for i in range(4))
    call, leaves = call_tree(Net(), (x, 1, y, z), {"d": w})
    assert call.paths() == ("a", "rest.0", "rest.1", "d")
    assert call.call(Net(), leaves) == (x, 1, (y, z), None, {"d": w})
