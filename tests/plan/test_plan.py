"""What a user writes: patterns, layouts, plan files; each mistake is one message that names it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from hyperparallel.errors import LayoutError, PlanError, UserError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan import Plan
from hyperparallel.plan.plan import PlanFile, match

pytestmark = pytest.mark.pure
MESH = Layout((2, 2), ("dp", "tp"))
NAMES = [f"model.layers.{i}.{w}.weight" for i in range(3) for w in ("mlp.up_proj", "attn.q_proj")]


def test_the_first_pattern_that_matches_wins() -> None:
    first, second = MESH("tp", None), MESH(None, "tp")
    found = match({"*.1.*": first, "*.weight": second}, NAMES, "params")
    assert set(found) == set(NAMES)
    assert {n for n, (_, x) in found.items() if x == first} == {n for n in NAMES if ".1." in n}
    assert found[NAMES[0]][0] == "*.weight"


def test_a_star_of_a_module_pattern_is_one_part() -> None:
    known = ["model", "model.layers.0", "model.layers.0.mlp", "model.layers.1"]
    found = match({"model.layers.*": MESH()}, known, "activations", by_part=True)
    assert set(found) == {"model.layers.0", "model.layers.1"}
    assert len(match({"model.layers.*": MESH()}, known, "activations")) == 3


def test_a_pattern_that_matches_nothing_names_its_neighbours() -> None:
    with pytest.raises(PlanError) as caught:
        match({"model.layerz.*.up_proj.weight": MESH("tp", None)}, NAMES, "params")
    assert "layerz" in str(caught.value) and "nearest: model.layers" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MESH("tp", "tp"), LayoutError, "'tp' is used twice"),
        (lambda: MESH("tq", None), LayoutError, "'tq'"),
        (lambda: Layout((2, 2), ("dp",)), UserError, "dp"),
        (lambda: Layout((2, 2), ("dp", "dp")), UserError, "dp"),
        (lambda: Mesh((2, 2), ("dp", "tp"), (0, 1, 2)), UserError, "ranks"),
        (lambda: Mesh((2,), ("dp",), (1, 1)), UserError, "ranks"),
        (lambda: Plan(MESH, {"w": None}), PlanError, "params['w']: got None"),  # type: ignore[dict-item]
        (lambda: Plan(MESH, {"w": ("tp", None)}), PlanError, "a Layout"),  # type: ignore[dict-item]
        (lambda: Plan(MESH, inputs={"x": 3}), PlanError, "inputs['x']"),  # type: ignore[dict-item]
        (lambda: Plan(MESH, {"w": Layout((4,), ("tp",))("tp")}), PlanError, "the plan's mesh"),
        (lambda: Plan("dp"), PlanError, "mesh: got 'dp'; allowed: a Mesh"),  # type: ignore[arg-type]
        (lambda: Plan(MESH, [MESH("tp")]), PlanError, "params: got"),  # type: ignore[arg-type]
        (lambda: Plan(MESH, {1: MESH("tp")}), PlanError, "params[1]: got 1"),  # type: ignore[dict-item]
        (lambda: Plan(MESH, fsdp="dq"), PlanError, "fsdp: got 'dq'; allowed: one of dp, tp; write dp"),
        (lambda: Plan(MESH, fsdp=""), PlanError, "fsdp: got ''"),
        (lambda: Plan(MESH, batch=("data",)), PlanError, "batch: got 'data'; allowed: one of dp, tp"),
        (lambda: Plan(MESH, batch="dp"), PlanError, "write batch=('dp',) instead"),  # type: ignore[arg-type]
        (lambda: Plan(MESH, batch=("dp", "dp")), PlanError, "batch: got ('dp', 'dp'); allowed: each axis"),
        (lambda: Plan(MESH, batch=("tp",), fsdp="dp"), PlanError, "fsdp: got 'dp'; allowed: one of the"),
        (lambda: Plan(MESH, fsdp="dp", zero=4), PlanError, "1, 2 or 3"),
        (lambda: Plan(MESH, fsdp="dp", zero=True), PlanError, "zero: got True; allowed: 1, 2 or 3"),
        (lambda: Plan(MESH, zero=1), PlanError, "zero: got 1; allowed: 3, as nothing is kept cut"),
        (lambda: Plan(MESH, exact="yes"), PlanError, "exact: got 'yes'; allowed: True or False"),  # type: ignore[arg-type]
        (lambda: Plan(MESH, fsdp="dp", in_flight_bytes=-1), PlanError, "in_flight_bytes: got -1"),
        (lambda: Plan(MESH, fsdp="dp", in_flight_bytes=1e6), PlanError, "whole number of bytes"),  # type: ignore[arg-type]
        (lambda: Plan(MESH, fsdp="dp", in_flight_bytes=True), PlanError, "write in_flight_bytes=64 << 20"),
    ],
)
def test_misuse_is_named(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("names", "more", "batch"),
    [
        (("dp", "tp"), {}, ("dp",)),
        (("pp", "fsdp", "tp"), {}, ("fsdp",)),
        (("dp_0", "dp_1", "tp"), {}, ("dp_0", "dp_1")),
        (("replica", "x"), {"fsdp": "x"}, ("replica", "x")),
        (("x", "y"), {}, ()),
        (("dp", "tp"), {"batch": ("tp",)}, ("tp",)),
        (("dp", "tp"), {"batch": ()}, ()),
        (("dp", "tp"), {"batch": ("tp", "dp")}, ("dp", "tp")),  # in mesh order, whatever was written
    ],
)
def test_batch_axes(names: tuple[str, ...], more: dict[str, Any], batch: tuple[str, ...]) -> None:
    assert Plan(Mesh((2,) * len(names), names), **more).batch_axes == batch


ENTRY = st.sampled_from([None, "dp", "tp", ("dp", "tp"), ("tp", "dp")])


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    ranks = draw(st.sampled_from([None, (0, 2, 1, 3), (4, 5, 6, 7)]))
    mesh = Mesh((2, 2), ("dp", "tp"), ranks)

    def layouts() -> dict[str, Layout]:
        found = {}
        for name in draw(st.lists(st.sampled_from(["*.w", "a[0]", "x: y", "- z", "née"]), unique=True)):
            dims = [draw(ENTRY)]
            dims += [None] * draw(st.integers(0, 2))
            found[name] = mesh(*dims)
        return found

    values: dict[str, Any] = {
        "fsdp": draw(st.sampled_from([None, "dp", "tp"])),
        "zero": draw(st.sampled_from([1, 2, 3])),
        "batch": draw(st.sampled_from([None, (), ("dp",), ["dp"], ("dp", "tp"), ("tp", "dp")])),
        "compute": draw(st.sampled_from([None, "bfloat16"])),
        "reduce": draw(st.sampled_from(["float32", "bfloat16"])),
        "exact": draw(st.booleans()),
        "in_flight_bytes": draw(st.sampled_from([None, 0, 1 << 26])),
        "params": layouts(),
        "inputs": layouts(),
        "activations": layouts(),
    }
    assert {"mesh", *values} == {one.name for one in fields(Plan)}, "a field that no plan here varies"
    try:
        return Plan(mesh, **values)
    except PlanError:
        reject()


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(random_plans())
def test_a_plan_file_reads_back_equal(plan: Plan) -> None:
    again = Plan.from_yaml(plan.to_yaml())
    assert again == plan
    assert again.to_yaml() == plan.to_yaml()
    assert list(again.params) == list(plan.params), "order says which pattern wins"
    as_json = json.dumps(yaml.safe_load(plan.to_yaml()))
    assert Plan.from_yaml(as_json) == plan, "a plan file may be written as JSON too"


def test_a_plan_file_has_the_fields_of_a_plan() -> None:
    assert set(PlanFile.model_fields) == {one.name for one in fields(Plan)} | {"ranks"}
    for name, field in PlanFile.model_fields.items():
        if name not in ("mesh", "ranks"):
            assert field.get_default(call_default_factory=True) == getattr(Plan(MESH), name), name


WAYS = {"tier": {"tier": "host"}, "partial": {"partial": {"tp": "sum"}}}


@pytest.mark.parametrize("what", ["params", "inputs", "activations"])
@pytest.mark.parametrize("field", WAYS)
def test_what_of_a_layout_is_not_carried_is_refused_by_name(what: str, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(MESH, **{what: {"a.weight": MESH("dp", None, **WAYS[field])}})
    assert str(caught.value).startswith(f"{what}['a.weight'].{field}: got ")
    for written in ('Layout((2, 2), ("dp", "tp"))("tp", tier="host")', {"dims": ["tp"], field: "host"}):
        text = yaml.safe_dump({"mesh": {"dp": 2, "tp": 2}, what: {"a.weight": written}})
        with pytest.raises(PlanError, match=rf"^{what}\.a\.weight: got .*axis names or null"):
            Plan.from_yaml(text)


def test_every_field_of_a_layout_is_carried_by_a_plan_or_refused() -> None:
    told = {"mesh", "dims", *WAYS}
    assert {name for name in Layout.__slots__ if not name.startswith("_")} == told


def test_a_plan_file_on_disk(tmp_path: Path) -> None:
    plan = Plan(MESH, {"*.up_proj.weight": MESH("tp", None)}, fsdp="dp", zero=2)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    with pytest.raises(PlanError, match=r"missing\.yaml.*No such file"):
        Plan.load(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mesh: {dp: 2}\nparam: {}\n", "plan file: got 'param'"),
        ("mesh: {dp: 2}\nparams: {w: [dq]}\n", "dq"),
        ("mesh: {dp: 2}\nparams: {w: null}\n", "params.w: got nothing; allowed: axis names or null, a list"),
        ("mesh: {dp: 2}\nparams: {w: [dp, dp]}\n", "used twice"),
        ("mesh: {dp: two}\n", "mesh.dp: got 'two'"),
        ("params: {}\n", "mesh: got"),
        ("mesh: {dp: 2}\nfsdp: tp\n", "one of dp"),
        ("mesh: {dp: 2}\nfsdp: dp\nzero: 7\n", "1, 2 or 3"),
        ("mesh: {dp: 2}\nexact: 1\n", "exact: got 1"),
        ("mesh: {dp: two}\n", "a whole number; write mesh: {dp: 2, tp: 2} instead"),
        ("mesh: [2, 2]\n", "a mapping of names to values"),
        ("mesh: [1, 2\n", "line 2, column 1; allowed: YAML"),
        ("\tmesh: 2\n", "a tab stands where lines are indented); write spaces"),
        ("", "plan file: got nothing"),
        ("- 1\n", "plan file"),
        ("mesh: {dp: 0}\n", "0"),
        ("mesh: {dp: 2}\nexact: false\nexact: true\n", "line 3, column 1; allowed: YAML or JSON (each key"),
        ("mesh: {dp: 2}\nparams: {w: [dp], w: [null]}\n", "each key once: 'w' stands here again"),
        ("mesh: {dp: 2, dp: 4}\n", "each key once: 'dp' stands here again"),
        (3, "plan file: got 'int'; allowed: the text"),
    ],
)
def test_a_wrong_plan_file_names_its_field(text: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Plan.from_yaml(text)
    assert words in str(caught.value), str(caught.value)
