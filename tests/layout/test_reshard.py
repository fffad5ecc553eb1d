"""Plans between layouts: right by exact simulation, cheapest by exhaustive search."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings

from hyperparallel.errors import LayoutError
from hyperparallel.layout import (
    AllGather,
    AllReduce,
    AllToAll,
    Layout,
    Mesh,
    Move,
    Pend,
    Permute,
    ReduceScatter,
    SendRecv,
    Slice,
    Step,
    find_steps,
    reshard,
)
from hyperparallel.layout.emulate import cut, emulate, join
from hyperparallel.layout.exchange import moved_blocks
from tests.layout.oracle import fewest_received
from tests.layout.strategies import pairs

pytestmark = pytest.mark.pure
MESH = Mesh((2, 2), ("dp", "tp"))


def whole(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-9, 10, shape)


def check(src: Layout, dst: Layout, shape: tuple[int, ...], **options: object) -> tuple[Step, ...]:
    """The steps, after seeing that they chain, and that they bring every rank what `dst` says."""
    steps = reshard(src, dst, shape, **options)  # type: ignore[arg-type]
    chain = [src, *(step.dst for step in steps)]
    assert chain[-1] == dst and [step.src for step in steps] == chain[:-1]
    tensor = whole(shape)
    held = emulate(steps, cut(src, tensor), shape)
    assert np.array_equal(join(dst, held, shape), tensor)
    return steps


def kinds(steps: tuple[Step, ...]) -> list[type[Step]]:
    return [type(step) for step in steps]


@settings(max_examples=400, deadline=None)
@given(pairs(across=False))
def test_there_and_back_is_the_identity(pair: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    src, dst, shape = pair
    tensor = whole(shape)
    there = check(src, dst, shape)
    back = check(dst, src, shape)
    held = emulate(back, emulate(there, cut(src, tensor), shape), shape)
    assert np.array_equal(join(src, held, shape), tensor)


@settings(max_examples=300, deadline=None)
@given(pairs(across=True))
def test_between_meshes_there_and_back_is_the_identity(
    pair: tuple[Layout, Layout, tuple[int, ...]],
) -> None:
    src, dst, shape = pair
    tensor = whole(shape)
    there, back = check(src, dst, shape), check(dst, src, shape)
    held = emulate(back, emulate(there, cut(src, tensor), shape), shape)
    assert np.array_equal(join(src, held, shape), tensor)
    assert sum(isinstance(step, SendRecv) for step in there) == (src.mesh != dst.mesh)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (2, 2, 2), (2, 4, 3), (8, 8)])
def test_no_path_of_collectives_moves_less(sizes: tuple[int, ...]) -> None:
    rng = random.Random(str(sizes))
    mesh = Mesh(sizes, ("a", "b", "c")[: len(sizes)])
    for _ in range(60 if mesh.size < 64 else 12):
        ndim = rng.randrange(1, 4)
        shape = tuple(mesh.size * rng.randrange(1, 4) for _ in range(ndim))
        src, dst = any_layout(rng, mesh, ndim, "sum"), any_layout(rng, mesh, ndim, "")
        keep = [axis for axis in src.free_axes if axis in dst.free_axes and rng.random() < 0.3]
        pending = dict.fromkeys(keep, "sum")
        src = src.replace(partial={**dict(src.partial), **pending})
        dst = dst.replace(partial=pending)
        steps = check(src, dst, shape)
        received = sum(step.num_elements(shape) for step in steps)
        assert received <= fewest_received(src, dst, shape) * (1 + 1e-9), f"{src} -> {dst} {shape}"


def any_layout(rng: random.Random, mesh: Mesh, ndim: int, op: str) -> Layout:
    dims: list[tuple[str, ...]] = [()] * ndim
    partial = {}
    for axis in rng.sample(mesh.names, len(mesh.names)):
        choice = rng.randrange(ndim + 1 + bool(op))
        if choice < ndim:
            dims[choice] += (axis,)
        elif choice > ndim:
            partial[axis] = op
    return mesh(*dims, partial=partial)


@pytest.mark.parametrize("shape", [(8, 8, 8), (5, 3, 7)])
@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("axes", [("x",), ("x", "y"), ("y", "x")])
def test_partial_to_shard_is_one_reduce_scatter(
    axes: tuple[str, ...], dim: int, shape: tuple[int, ...]
) -> None:
    mesh = Mesh((2, 4)[: len(axes)], ("x", "y")[: len(axes)])
    dims = [axes if d == dim else None for d in range(3)]
    src = mesh(None, None, None, partial=dict.fromkeys(axes, "sum"))
    steps = check(src, mesh(*dims), shape)
    if shape == (8, 8, 8) or len(axes) == 1:
        assert [(type(step), step.axes) for step in steps] == [(ReduceScatter, axes)]
    # Where pieces do not divide, one scatter per axis may round up less than a joint one.
    joint = ReduceScatter(axes, src, mesh(*dims), dim, "sum").num_elements(shape)
    assert sum(step.num_elements(shape) for step in steps) <= joint
    assert set(kinds(steps)) == {ReduceScatter}


def test_axes_in_another_order_are_one_permute() -> None:
    steps = check(MESH(("dp", "tp"), None), MESH(("tp", "dp"), None), (8, 3))
    assert kinds(steps) == [Permute]
    assert steps[0].num_bytes((8, 3), 4) == 2 * 3 * 4
    assert kinds(
        check(
            MESH(
                ("dp", "tp"),
            ),
            MESH(
                ("tp", "dp"),
            ),
            (5,),
        )
    ) == [Permute]


def test_rank_list_decides_who_sends_to_whom() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))
    (step,) = check(mesh(("dp", "tp")), mesh(("tp", "dp")), (4,))
    assert isinstance(step, Permute)
    sent = {(p.src_rank, p.dst_rank) for p in step.blocks((4,)) if p.src_rank != p.dst_rank}
    assert sent == {(1, 2), (2, 1)}


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ((("dp", "tp"), None), (None, None), [(AllGather, ("dp", "tp"))]),
        ((("dp", "tp"), None), ("dp", None), [(AllGather, ("tp",))]),
        ((("dp", "tp"), None), (None, ("dp", "tp")), [(AllToAll, ("dp", "tp"))]),
        (("dp", None), (None, "dp"), [(AllToAll, ("dp",))]),
        (("dp", "tp"), ("tp", "dp"), [(Permute, ("dp", "tp"))]),
        ((None, None), ("dp", "tp"), [(Slice, ("dp",)), (Slice, ("tp",))]),
        ((None, "dp"), ("tp", None), [(Slice, ("tp",)), (AllGather, ("dp",))]),
        (("dp", None), ("dp", None), []),
    ],
)
def test_the_fewest_steps(src: tuple, dst: tuple, expected: list[tuple]) -> None:
    steps = check(MESH(*src), MESH(*dst), (8, 8))
    assert [(type(step), step.axes) for step in steps] == expected


def test_all_reduce_over_two_axes_is_one_step() -> None:
    pending = {"dp": "sum", "tp": "sum"}
    (step,) = check(MESH(None, partial=pending), MESH(None), (8,))
    assert (type(step), step.axes) == (AllReduce, ("dp", "tp"))
    assert step.num_bytes((8,), 4) == 2 * 3 * 8 // 4 * 4


def test_bytes_of_one_rank() -> None:
    mesh, shape = Mesh((4,), ("x",)), (8, 16)
    full = 8 * 16 * 2
    row, column, rest, pending = mesh("x", None), mesh(None, "x"), mesh(None, None), {"x": "sum"}
    for src, dst, expected in [
        (row, rest, full * 3 // 4),
        (rest.replace(partial=pending), rest, 2 * full * 3 // 4),
        (rest.replace(partial=pending), row, full * 3 // 4),
        (row, column, full // 4 * 3 // 4),
        (rest, row, 0),
        (rest, rest.replace(partial=pending), 0),
    ]:
        (step,) = check(src, dst, shape)
        assert step.num_bytes(shape, 2) == expected


def test_an_uneven_gather_is_counted_by_the_rank_that_lacks_most() -> None:
    mesh = Mesh((4,), ("x",))
    (step,) = check(mesh("x", None), mesh(None, None), (5, 10))
    assert step.num_elements((5, 10)) == 50  # the last rank holds no row
    assert check(mesh(None, None), mesh("x", None), (5, 10))[0].num_elements((5, 10)) == 0


@pytest.mark.parametrize("matrix", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("rows", range(10))
def test_two_axes_on_one_uneven_dim_fused_and_step_by_step(matrix: tuple[int, int], rows: int) -> None:
    mesh, shape = Mesh(matrix, ("a", "b")), (rows, 3)
    cut_twice = mesh(("a", "b"), None)
    fused = check(cut_twice, mesh(None, None), shape)
    assert kinds(fused) == [AllGather]
    held = cut(cut_twice, whole(shape))
    for dst in (mesh("a", None), mesh(None, None)):
        src, steps = held, check(cut_twice, dst, shape)
        held, cut_twice = emulate(steps, src, shape), dst
    assert all(np.array_equal(piece, whole(shape)) for piece in held.values())


def test_planning_changes_no_layout_and_answers_from_its_cache() -> None:
    src, dst = MESH("dp", None, partial={"tp": "sum"}), MESH(None, "tp")
    before = (hash(src), str(src), src.partial)
    first = check(src, dst, (6, 6))
    assert (hash(src), str(src), src.partial) == before
    assert src == MESH("dp", None, partial={"tp": "sum"})
    assert reshard(src, dst, [6, 6]) is first
    assert find_steps(src, dst, (6, 6)) == first


def test_pieces_are_cut_before_they_are_reduced() -> None:
    mesh, shape = Mesh((8, 8), ("dp", "tp")), (64, 64)
    steps = check(mesh(None, None, partial={"tp": "sum"}), mesh("tp", None), shape)
    assert kinds(steps) == [Slice, ReduceScatter, AllGather]
    plain = ReduceScatter(("tp",), steps[0].src, steps[-1].dst, 0, "sum")
    assert 4 * sum(step.num_bytes(shape) for step in steps) == plain.num_bytes(shape)


def test_costs_of_the_caller_decide() -> None:
    mesh, shape = Mesh((8, 8), ("dp", "tp")), (64, 64)
    src, dst = mesh(None, None, partial={"tp": "sum"}), mesh("tp", None)

    def latency(step: Step, shape: tuple[int, ...], itemsize: int) -> float:
        return 1.0

    def no_permute(step: Step, shape: tuple[int, ...], itemsize: int) -> float:
        return 1e9 if isinstance(step, Permute) else step.num_bytes(shape, itemsize) * 1e-9

    assert kinds(check(src, dst, shape, costs=latency)) == [ReduceScatter]
    swapped = check(mesh("dp", "tp"), mesh("tp", "dp"), shape, costs=no_permute)
    assert Permute not in kinds(swapped)


def test_different_operations_are_finished_in_order() -> None:
    src = MESH(None, partial={"dp": "sum", "tp": "max"})
    steps = check(src, MESH(None), (6,))
    assert [(type(step), step.axes) for step in steps] == [
        (ReduceScatter, ("tp",)),
        (ReduceScatter, ("dp",)),
        (AllGather, ("tp", "dp")),
    ]
    # The sum may not be done before the maximum inside it: both go, and the maximum comes back.
    steps = check(src, MESH(None, partial={"tp": "max"}), (6,))
    assert [step.axes for step in steps if isinstance(step, ReduceScatter)] == [("tp",), ("dp",)]
    assert type(steps[-1]) is Pend


def test_tiers_are_changed_where_the_device_is_used() -> None:
    host = MESH("dp", None, tier="host")
    assert kinds(check(host, MESH(None, None), (4, 4))) == [Move, AllGather]
    assert kinds(check(MESH(None, None), host, (4, 4))) == [Slice, Move]
    assert kinds(check(host, host.replace(tier="disk"), (4, 4))) == [Move]
    for tier in ("host", "disk"):  # collectives read and write the device's own memory only
        steps = check(host, MESH(None, "dp", tier=tier), (4, 4))
        assert kinds(steps) == [Move, AllToAll, Move]
    pending = MESH(None, None, partial={"tp": "sum"}, tier="host")
    assert kinds(check(pending, MESH(None, None, tier="disk"), (4, 4))) == [Move, AllReduce, Move]
    away = Mesh((4,), ("tp",), (4, 5, 6, 7))("tp", None, tier="host")
    assert kinds(check(host, away, (4, 4))) == [Move, SendRecv, Move]


def test_a_pending_sum_is_not_lost_in_an_exchange() -> None:
    left, right = Mesh((2,), ("tp",)), Mesh((2,), ("tp",), (2, 3))
    src = left(None, partial={"tp": "sum"})
    for dst in (right(None), left("tp"), right(None, partial={"tp": "sum"})):
        with pytest.raises(LayoutError, match=r"partial: got .*an exchange adds nothing up"):
            moved_blocks(src, dst, (4,))


def test_two_meshes_in_one_program() -> None:
    left, right = Mesh((2,), ("tp",), (0, 1)), Mesh((3,), ("dp",), (2, 3, 4))
    steps = check(left("tp", None), right("dp", None), (5, 4))
    assert kinds(steps) == [SendRecv]
    blocks = {(p.src_rank, p.dst_rank): p.src_slices[0] for p in steps[0].blocks((5, 4))}  # type: ignore[attr-defined]
    assert blocks == {(0, 2): slice(0, 2), (0, 3): slice(2, 3), (1, 3): slice(0, 1),
                      (1, 4): slice(1, 2)}  # fmt: skip


def test_between_meshes_each_part_crosses_once() -> None:
    left, right = Mesh((4,), ("tp",)), Mesh((4,), ("tp",), (4, 5, 6, 7))
    src = left(None, None, partial={"tp": "sum"})
    steps = check(src, right(None, None), (8, 8))
    assert kinds(steps) == [ReduceScatter, SendRecv, AllGather]
    crossing = [p for p in steps[1].blocks((8, 8)) if p.src_rank != p.dst_rank]  # type: ignore[attr-defined]
    assert sum(p.num_elements for p in crossing) == 64


def test_overlapping_meshes_keep_what_a_rank_has() -> None:
    small, large = Mesh((2,), ("x",)), Mesh((4,), ("x",))
    (step,) = check(small("x"), large("x"), (8,))
    assert step.num_elements((8,)) == 2
    (back,) = check(large("x"), small("x"), (8,))
    assert back.num_elements((8,)) == 4


def test_a_layout_of_another_rank_is_refused() -> None:
    with pytest.raises(LayoutError, match="one entry per dim of the tensor"):
        reshard(MESH("dp"), MESH(None), (4, 4))


def test_steps_print_what_they_do() -> None:
    (step,) = reshard(MESH(("dp", "tp"), None), MESH(None, None), (8, 8))
    assert str(step) == 'AllGather(dim=0) over (dp, tp): (("dp", "tp"), None) -> (None, None)'
