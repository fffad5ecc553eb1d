"""Random meshes, layouts and shapes for the laws; uneven and empty sizes included."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hyperparallel.layout import Layout, Mesh

MESHES = (
    Mesh((2, 2), ("a", "b")),
    Mesh((2, 3), ("a", "b"), (0, 2, 1, 3, 5, 4)),
    Mesh((2, 2, 2), ("a", "b", "c")),
    Mesh((4,), ("a",)),
    Mesh((3,), ("x",), (7, 8, 9)),
    Mesh((1, 2), ("q", "r"), (1, 0)),
)


@st.composite
def layouts(
    draw: st.DrawFn, mesh: Mesh, ndim: int, ops: Sequence[str] = ("sum", "max", "min", "prod")
) -> Layout:
    """Any layout of that many dims: axes in any order on any dim, pending, or unused."""
    dims: list[tuple[str, ...]] = [()] * ndim
    partial = {}
    for axis in draw(st.permutations(mesh.names)):
        choice = draw(st.integers(-2 if ops else -1, ndim - 1))
        if choice >= 0:
            dims[choice] += (axis,)
        elif choice == -2:
            partial[axis] = draw(st.sampled_from(ops))
    return mesh(*dims, partial=partial)


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 9), max_size=max_dims)))


@st.composite
def cuts(draw: st.DrawFn, ops: Sequence[str] = ()) -> tuple[Layout, tuple[int, ...]]:
    """A layout and a shape it fits."""
    shape = draw(shapes())
    return draw(layouts(draw(st.sampled_from(MESHES)), len(shape), ops)), shape


@st.composite
def pairs(draw: st.DrawFn, across: bool) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Two layouts of one tensor, on one mesh or on any two."""
    shape = draw(shapes())
    first = draw(st.sampled_from(MESHES))
    second = draw(st.sampled_from(MESHES)) if across else first
    return draw(layouts(first, len(shape))), draw(layouts(second, len(shape))), shape
