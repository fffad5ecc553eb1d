"""Layouts: equal meaning is equal value, text reads back, mistakes are named."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings

import hyperparallel.layout
from hyperparallel.errors import LayoutError
from hyperparallel.layout import Layout, Mesh, from_placements, placements
from tests.layout.strategies import cuts

pytestmark = pytest.mark.pure
MESH = Mesh((2, 2), ("dp", "tp"))
OPS = ("sum", "max", "min", "prod")


@pytest.mark.parametrize(
    "same",
    [
        Layout((2, 2), ("dp", "tp"))("dp", None),
        Layout((2, 2), ("dp", "tp"), ("dp", "None")),
        Layout((2, 2), ("dp", "tp"), (("dp",), ())),
        Layout((2, 2), ("dp", "tp"), (1, -1)),
        MESH(["dp"], None, partial={}),
        MESH("tp", None).replace(dims=("dp", None)),
        Layout.parse('Mesh((2, 2), ("dp", "tp"), (0, 1, 2, 3))("dp", "None")'),
        Layout.parse('Layout((2, 2), ("dp", "tp"))("dp", None)'),
        Layout.parse('Layout((2, 2), ("dp", "tp"), ("dp", None), tier="device")'),
        Layout.parse('Layout((2, 2), ("dp", "tp"), tensor_map=(1, -1), ranks=(0, 1, 2, 3))'),
    ],
)
def test_every_spelling_is_one_value(same: Layout) -> None:
    assert same == MESH("dp", None) and hash(same) == hash(MESH("dp", None))


def test_axes_of_size_one_say_nothing() -> None:
    mesh = Mesh((1, 2), ("pp", "tp"))
    assert mesh(("pp", "tp"), partial={"pp": "sum"}) is mesh("tp")


def test_partial_axes_stand_in_mesh_order() -> None:
    one, other = {"tp": "sum", "dp": "sum"}, {"dp": "sum", "tp": "sum"}
    assert MESH(None, partial=one) is MESH(None, partial=other)


def test_order_tier_mesh_and_pending_sums_count() -> None:
    different = [
        MESH(("dp", "tp")),
        MESH(("tp", "dp")),
        MESH("dp"),
        MESH("dp", tier="host"),
        MESH("dp", partial={"tp": "sum"}),
        MESH("dp", partial={"tp": "max"}),
        Mesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))("dp"),
        Mesh((4,), ("dp",))("dp"),
    ]
    assert len(set(different)) == len(different)


@settings(max_examples=200, deadline=None)
@given(cuts(OPS))
def test_text_reads_back(cut: tuple[Layout, tuple[int, ...]]) -> None:
    for layout in (cut[0], cut[0].replace(tier="host")):
        assert Layout.parse(str(layout)) == layout
        assert str(Layout.parse(str(layout))) == str(layout)
        # Files that were written before meshes printed under their own name are still read.
        assert Layout.parse(str(layout).replace("Mesh(", "Layout(", 1)) == layout
        assert eval(repr(layout)) == layout and eval(repr(layout.mesh)) == layout.mesh


def test_text_is_as_one_writes_it() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))
    layout = mesh(None, "dp", partial={"tp": "sum"}, tier="host")
    assert str(layout) == (
        'Mesh((2, 2), ("dp", "tp"), ranks=(0, 2, 1, 3))(None, "dp", partial={"tp": "sum"}, tier="host")'
    )
    assert str(MESH(("dp", "tp"))) == 'Mesh((2, 2), ("dp", "tp"))(("dp", "tp"))'


def test_a_layout_is_frozen_and_survives_copies() -> None:
    layout = MESH("dp", None, partial={"tp": "sum"})
    for name in ("dims", "partial", "tier", "mesh"):
        with pytest.raises(AttributeError, match="frozen"):
            setattr(layout, name, ())
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout == copy.deepcopy(layout) and hash(again) == hash(layout)
    assert {layout: 1}[again] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MESH("dp", "dp"), r"tensor_map.*each axis once per tensor; 'dp' is used twice"),
        (lambda: MESH(("dp", "dp")), "'dp' is used twice"),
        (lambda: MESH("tq"), r"tensor_map\[0\]: got 'tq'.*one of dp, tp; write tp"),
        (lambda: MESH(None, ("dp", "xx")), r"tensor_map\[1\]: got 'xx'"),
        (lambda: MESH(2), "tensor_map: got 2.*0 to 1, counted from the right"),
        (lambda: MESH(1.5), "tensor_map"),
        (lambda: MESH("dp", partial={"dp": "sum"}), "partial: got 'dp'.*cuts no dim"),
        (lambda: MESH("dp", partial={"tp": "mean"}), r"partial\['tp'\]: got 'mean'.*sum, max"),
        (lambda: MESH("dp", partial={"t": "sum"}), "partial: got 't'.*write tp"),
        (lambda: MESH("dp", tier=""), "tier.*device, host or disk"),
        (lambda: Layout((2, 2), ("dp", "tp"), ("dp",), ranks=(0,)), "ranks.*4 ranks"),
        (lambda: MESH("dp").slices((4, 4), 0), "tensor_map.*one entry per dim.*write 2 entries"),
        (lambda: MESH("dp").slices((4,), 9), "rank: got 9"),
        (lambda: MESH("dp").global_index((4,), 0, (2,)), "local_index: got .2,."),
        (lambda: MESH("dp").owners((4,), (4,)), "global_index"),
        (lambda: Layout.parse("Layout((2,), ('dp',)"), "layout: got"),
        (lambda: Layout.parse("Layout((2,), ('dp',))"), "layout: got"),
        (lambda: Layout.parse("Mesh((2,), ('dp',), ('dp',))"), "layout: got"),
        (lambda: Layout.parse("Layout((2,), ('dp',), (0, 1))('dp')"), "layout: got"),
        (lambda: Layout.parse("Mesh((2,), ('dp',))('dp')('dp')"), "layout: got"),
        (lambda: Layout.parse("Mesh((2,), ('dp',))('dp', **{'tier': 'host'})"), "layout: got"),
        (lambda: Layout.parse("Mesh((2,), ('dp',))('dp', partial={[]: 'sum'})"), "layout: got"),
        (lambda: Layout((2,), ("dp",), partial={"dp": "sum"}), "partial: got.*write tensor_map too"),
        (lambda: Layout((2,), ("dp",), "dp"), r"tensor_map: got 'dp'.*write \('dp',\)"),
        (lambda: Layout((2,), ("dp",), tier="host"), "tier: got 'host'.*not of a mesh"),
        (lambda: Layout.parse("open('x')('y')"), "layout: got"),
        (lambda: Layout.parse("Layout((2,), ('dp',))(print(1))"), "layout: got"),
        (lambda: Layout.parse("Layout((2,), ('dp',))('dp', size=2)"), "layout: got"),
        (lambda: Layout.parse("Layout((2,), ('dp',))('tp')"), "got 'tp'"),
        (lambda: placements(MESH(("tp", "dp"))), "axes in mesh order"),
        (lambda: from_placements(MESH, (("shard", 0),), 1), "one per axis"),
        (lambda: from_placements(MESH, (("shard", 1), ("replicate",)), 1), "placement of dp"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()  # type: ignore[operator]


@settings(max_examples=100, deadline=None)
@given(cuts(OPS))
def test_placements_go_there_and_back(cut: tuple[Layout, tuple[int, ...]]) -> None:
    layout = cut[0]
    order = layout.mesh.names.index
    dims = [tuple(sorted(axes, key=order)) for axes in layout.dims]
    layout = layout.replace(dims=dims)
    assert from_placements(layout.mesh, placements(layout), layout.ndim) == layout


TYPED = """
from typing_extensions import assert_type
from hyperparallel.layout.layout import Layout, Mesh

assert_type(Layout((2,), ("dp",)), Mesh)
assert_type(Layout((2,), ("dp",), ranks=(1, 0)), Mesh)
assert_type(Layout((2,), ("dp",), ("dp", None)), Layout)
assert_type(Layout((2,), ("dp",))("dp"), Layout)
assert_type(Layout((2,), ("dp",))("dp").mesh.rename({"dp": "tp"}), Mesh)
"""


def test_type_checkers_know_a_mesh_from_a_layout(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api")
    file = tmp_path / "typed.py"
    wrong = 'Layout((2,), ("dp",), tier="host")\nLayout((2,), ("dp",), ("dp",))("dp")\n'
    file.write_text(TYPED + wrong)
    # Only these files are read: numpy's and torch's stubs take half a minute and say nothing here.
    read = [str(Path(hyperparallel.layout.__file__).with_name(f"{name}.py")) for name in ("layout", "grid")]
    flags = ["--follow-imports=skip", f"--cache-dir={tmp_path / 'cache'}"]
    out, err, _ = mypy.run([*flags, str(file), *read])
    lines = [line for line in out.splitlines() if "typed.py" in line and ": error:" in line]
    assert not err and [line.rsplit("[", 1)[1] for line in lines] == ["call-overload]", "operator]"], out


def test_kinds_of_axes() -> None:
    mesh = Mesh((2, 2, 2, 1), ("a", "b", "c", "d"))
    layout = mesh("c", None, partial={"a": "sum"})
    assert (layout.cut_axes, layout.partial_axes, layout.free_axes) == (("c",), ("a",), ("b",))
    assert not layout.is_whole and Layout.full(mesh, 2).is_whole
