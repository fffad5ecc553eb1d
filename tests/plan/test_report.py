"""Reports fold repeated blocks and lose nothing on the way."""

from __future__ import annotations

import dataclasses

import pytest

from hyperparallel.plan.derived import Derived
from hyperparallel.plan.report import (
    communication_rows,
    layout_names,
    mesh_lines,
    parameter_rows,
    text_report,
)
from hyperparallel.plan.wording import bytes_words, fold
from tests.plan.sample import MESH, llama

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("num_layers", [1, 2, 8])
def test_rows_partition_the_parameters(num_layers: int) -> None:
    derived = llama(num_layers)
    rows = parameter_rows(derived)
    assert sorted(n for row in rows for n in row.names) == sorted(p.name for p in derived.params)
    assert sum(r.rank_bytes for r in rows) == sum(p.rank_bytes for p in derived.params)
    assert len(rows) == 12


def test_a_layer_that_differs_gets_its_own_row() -> None:
    derived = llama(4)
    odd = "model.layers.2.mlp.up_proj.weight"
    params = tuple(
        dataclasses.replace(p, stored=MESH(None, None)) if p.name == odd else p
        for p in derived.params
    )
    titles = [row.title for row in parameter_rows(dataclasses.replace(derived, params=params))]
    assert odd in titles and "model.layers.*.mlp.up_proj.weight [x3]" in titles


@pytest.mark.parametrize("by_module", [True, False])
def test_collectives_add_up(by_module: bool) -> None:
    derived = llama()
    rows = communication_rows(derived, by_module=by_module)
    assert sum(r.count for r in rows) == sum(c.count for c in derived.communications)
    assert sum(r.step_bytes for r in rows) == sum(c.step_bytes for c in derived.communications)
    keys = [(r.phase, r.kind, r.axes, r.module, r.reason) for r in rows]
    assert len(set(keys)) == len(keys)
    assert len(rows) == (5 if by_module else 3)


def test_text_names_every_row() -> None:
    derived = llama()
    text = text_report(derived)
    for row in parameter_rows(derived):
        assert row.title in text
    assert "16 x all_reduce over dp" in text and "input_ids: dim 0 in 2 by dp" in text
    assert derived.plan_hash in text


def test_mesh_lines_say_what_each_axis_cuts() -> None:
    lines = mesh_lines(llama(1))
    assert lines[0] == "mesh dp=2, tp=2"
    assert "1 of 12" in lines[1] and "batch (input_ids, labels)" in lines[1]


def test_an_axis_that_cuts_nothing_is_said() -> None:
    """Such as one whose name the recipe's layouts don't know."""
    derived = llama(1)
    used = [p for p in derived.params if not any("tp" in axes for axes in p.stored.dims)]
    messages = tuple(c for c in derived.communications if "tp" not in c.axes)
    idle = dataclasses.replace(derived, params=tuple(used), communications=messages)
    assert "tp (2 ranks): nothing is cut by it" in text_report(idle)
    assert "nothing is cut" not in text_report(derived)


def test_an_empty_plan_has_a_report() -> None:
    nothing = Derived("", (), {}, {}, (), (), 1, "")
    assert "none" in text_report(nothing) and mesh_lines(nothing) == []


def test_whole_comes_last_among_layout_names() -> None:
    names = layout_names(llama())
    assert names[0] == "dim 0 in 2 by tp" and names[-1] == "replicated"


@pytest.mark.parametrize(
    ("name", "folded"),
    [
        ("transformer.h.11.mlp.c_fc.weight", "transformer.h.*.mlp.c_fc.weight"),
        ("layers.0.experts.3.weight", "layers.*.experts.*.weight"),
        ("model.layers.7", "model.layers.*"),
        ("conv1.weight", "conv1.weight"),
        ("0.weight", "0.weight"),
        ("from layers.3, as layers.4 is", "from layers.*, as layers.* is"),
        ("costs 0.25 of it", "costs 0.25 of it"),
    ],
)
def test_fold(name: str, folded: str) -> None:
    assert fold(name) == folded


def test_bytes_words_keep_three_digits() -> None:
    assert [bytes_words(n) for n in (0, 999, 1000, 1_234_567, 5e12)] == [
        "0 B", "999 B", "1 kB", "1.23 MB", "5 TB",
    ]  # fmt: skip
