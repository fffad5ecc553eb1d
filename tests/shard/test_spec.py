"""Specs: canonical forms, pieces, and the finer view that makes two of them plain layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperparallel.layout import Layout, Mesh
from hyperparallel.shard.spec import Spec, common_view, make_spec, piece, spec_of_layout

pytestmark = pytest.mark.pure
MESH = Mesh((2, 2, 3), ("a", "b", "c"))


def held(spec: Spec, rank: int) -> np.ndarray:
    """Flat global indices that a rank holds, by cutting every factor of an index array."""
    factors = [f for dim in spec.dims for f in dim]
    whole = np.arange(int(np.prod([s for s, _ in factors]))).reshape([s for s, _ in factors])
    at = spec.mesh.coordinate(rank)
    for i, (size, axes) in enumerate(factors):
        start, length = piece(size, axes, spec.mesh, at)
        whole = whole.take(range(start, start + length), axis=i)
    return whole.reshape(-1)


@st.composite
def factored(draw: st.DrawFn) -> tuple[list[tuple[int, tuple[str, ...]]], ...]:
    axes = list(draw(st.permutations(["a", "b", "c"])))
    dims = []
    for _ in range(draw(st.integers(1, 2))):
        factors = []
        for _ in range(draw(st.integers(1, 3))):
            cut = tuple(axes.pop() for _ in range(draw(st.integers(0, min(1, len(axes))))))
            factors.append((draw(st.integers(1, 6)), cut))
        dims.append(factors)
    return tuple(dims)


@given(factored())
def test_canonical_form_holds_the_same_elements(dims: tuple) -> None:
    raw, spec = Spec(MESH, tuple(map(tuple, dims))), make_spec(MESH, dims)
    for rank in range(MESH.size):
        assert held(spec, rank).tolist() == held(raw, rank).tolist()


@given(factored())
def test_pieces_tile_the_tensor(dims: tuple) -> None:
    spec = make_spec(MESH, dims)
    cut = set(spec.axes)
    first = [r for r in range(MESH.size) if not any(MESH.coordinate(r)[n] for n in {"a", "b", "c"} - cut)]
    seen = np.concatenate([held(spec, rank) for rank in first])
    assert sorted(seen.tolist()) == list(range(int(np.prod(spec.shape))))


@given(factored(), st.data())
def test_common_view_holds_the_same_elements(dims: tuple, data: st.DataObject) -> None:
    src = make_spec(MESH, dims)
    plain = data.draw(st.sampled_from([(), ("a",), ("b", "c")]))
    dst = make_spec(MESH, [[(s, plain if i == 0 else ())] for i, s in enumerate(src.shape)])
    view = common_view(src, dst)
    if view is None:
        return
    shape, *layouts = view
    for spec, layout in zip((src, dst), layouts, strict=True):
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        for rank in range(MESH.size):
            assert whole[layout.slices(shape, rank)].reshape(-1).tolist() == held(spec, rank).tolist()


def test_plain_cuts_merge_and_inner_cuts_stay() -> None:
    assert make_spec(MESH, [[(2, ("a",)), (16, ("b",))]]).dims == (((32, ("a", "b")),),)
    assert make_spec(MESH, [[(4, ("a",)), (8, ())]]).dims == (((32, ("a",)),),)
    assert make_spec(MESH, [[(2, ()), (16, ("a",))]]).dims == (((2, ()), (16, ("a",))),)
    assert make_spec(MESH, [[(3, ("a",)), (8, ())]]).dims == (((3, ("a",)), (8, ())),)


def test_layouts_round_trip() -> None:
    layout = Layout((2, 2), ("a", "b"), ("a", ("b",), None))
    assert spec_of_layout(layout, (4, 6, 5)).layout() == layout
