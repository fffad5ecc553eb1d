"""A derived plan round-trips, is hashed by content, and explains itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hyperparallel.errors import PlanError
from hyperparallel.plan.derived import Derived
from tests.plan.sample import MESH, llama

pytestmark = pytest.mark.pure


def test_json_round_trip() -> None:
    derived = llama()
    again = Derived.from_json(derived.to_json())
    assert again == derived and again.content_hash == derived.content_hash


def test_content_hash_sees_every_field() -> None:
    derived = llama(2)
    hashes = {derived.content_hash}
    changed = [
        dataclasses.replace(derived, num_ranks=8),
        dataclasses.replace(derived, model_hash="f"),
        dataclasses.replace(derived, plan="mesh: {dp: 4}"),
        dataclasses.replace(derived, communications=derived.communications[1:]),
        dataclasses.replace(derived, values=derived.values[1:]),
        dataclasses.replace(derived, inputs={"input_ids": MESH(None, None)}),
        dataclasses.replace(derived, params=derived.params[::-1]),
        dataclasses.replace(derived, rewrites=()),
    ]
    hashes |= {each.content_hash for each in changed}
    assert len(hashes) == len(changed) + 1


LISTED = (
    '{"plan": "", "model_hash": "", "num_ranks": 1, "params": [], "inputs": [], "outputs": [], '
    '"communications": [], "values": [], "rewrites": []}'
)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"plan": 1, "params": [{}]}', "null", LISTED])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="derived plan"):
        Derived.from_json(text)


def test_rank_bytes_count_the_fullest_rank() -> None:
    derived = llama(1)
    for param in derived.params:
        pieces = []
        for rank in MESH.ranks:
            size = 2 if param.dtype == "bfloat16" else 4
            for length in param.stored.local_shape(param.shape, rank):
                size *= length
            pieces.append(size)
        assert param.rank_bytes == max(pieces)


def test_explain_says_layout_reason_and_communication() -> None:
    said = llama().explain("model.layers.3.mlp.down_proj.weight")
    assert "dim 1 in 2 by tp" in said
    assert "why: declared by '*.down_proj.weight'" in said
    assert "all_reduce over tp" in said and "524 kB" in said


def test_explain_tells_stored_from_used() -> None:
    said = llama().explain("lm_head.weight")
    assert "stored: dim 0 in 4 by tp x dp" in said and "used: dim 0 in 2 by tp" in said
    assert "all_gather over dp" in said


@pytest.mark.parametrize("name", ["input_ids", "loss", "mm_2", "model.layers.1.mlp"])
def test_explain_knows_inputs_outputs_values_and_modules(name: str) -> None:
    assert "dp" in llama().explain(name)


def test_explain_counts_rewrites_and_says_which_round() -> None:
    _, rounding, exact = llama(2).explain("rewrites").splitlines()
    assert "6 x a + b * c -> addcmul(a, b, c), 6 calls fewer" in rounding and "exact=True" in rounding
    assert "4 x x ** 2 -> x * x (every bit stays)" in exact
    assert dataclasses.replace(llama(2), rewrites=()).explain("rewrites") == "local rewrites: none"


def test_explain_suggests_on_a_miss() -> None:
    with pytest.raises(PlanError, match=r"nearest: .*layers\.3\.mlp\.down_proj\.weight"):
        llama().explain("model.layer.3.mlp.down_proj.weight")


@pytest.mark.parametrize("name", [None, 3, ("lm_head.weight",)])
def test_explain_refuses_what_is_no_name(name: Any) -> None:
    with pytest.raises(PlanError, match=r"name: got .*the name of a parameter"):
        llama().explain(name)
