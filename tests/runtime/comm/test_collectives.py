"""Every collective, transport, dtype and size, even or not, against numpy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hyperparallel.errors import RunError, UserError
from hyperparallel.graph.collective_table import REDUCE_OPS, reduce_in_order
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.collectives import wait
from hyperparallel.runtime.comm.group import Group
from hyperparallel.runtime.comm.groups import Groups
from tests.ranks import run_ranks
from tests.runtime.comm.transports import TRANSPORTS, groups_over

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SIZES = {2: ([2, 2], [3, 1], [0, 4]), 3: ([1, 1, 1], [3, 0, 2], [0, 0, 5])}
RINGS = {2: [(0, 1), (1, 0)], 3: [(0, 1), (0, 2), (2, 0)]}


def sample(dtype: torch.dtype, shape: Sequence[int], rank: int) -> Tensor:
    """Small whole numbers that differ by element and rank, so that every sum is exact."""
    count = int(np.prod(shape))
    values = torch.arange(count).remainder(5) + rank
    return (values % 2 == 0 if dtype == torch.bool else values.to(dtype)).view(tuple(shape))


def array(x: Tensor) -> Any:
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def reduced(parts: Sequence[Any], op: str) -> Any:
    stack = np.stack(parts)
    made = {
        "sum": lambda: stack.sum(0, dtype=stack.dtype),
        "prod": lambda: stack.prod(0, dtype=stack.dtype),
        "max": lambda: stack.max(0),
        "min": lambda: stack.min(0),
        "avg": lambda: (stack.sum(0, dtype=stack.dtype) / len(parts)).astype(stack.dtype),
    }
    return made[op]()


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ("max", "min")
    if dtype.is_complex:
        return ("sum", "avg")
    return REDUCE_OPS if dtype.is_floating_point else ("sum", "max", "min", "prod")


def expect(got: Tensor, want: Any, dtype: torch.dtype, what: object) -> None:
    assert got.dtype == dtype and got.is_contiguous(), what
    # 16-bit averages are rounded; everything else here is exact.
    limit = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6
    np.testing.assert_allclose(array(got), want, rtol=limit, err_msg=str(what))


def reductions(group: Group, dtype: torch.dtype) -> None:
    n, me = group.size, group.index
    for op in ops_of(dtype):
        for shape in ((), (0,), (7,), (3, 5)):
            parts = [sample(dtype, shape, r) for r in range(n)]
            for over in (False, True):
                given = parts[me].clone()
                got = wait(collectives.all_reduce_start(given, op, group, over))
                expect(got, reduced([array(p) for p in parts], op), dtype, (op, shape, over))
                assert over or torch.equal(given, parts[me])
        for sizes in SIZES[n]:
            for dim in (0, 1):
                shape = (sum(sizes), 2) if dim == 0 else (2, sum(sizes), 3)
                parts = [sample(dtype, shape, r) for r in range(n)]
                got = wait(collectives.reduce_scatter_start(parts[me], dim, sizes, op, group))
                whole = reduced([array(p) for p in parts], op)
                want = np.split(whole, np.cumsum(sizes)[:-1], dim)[me]
                expect(got, want, dtype, (op, dim, sizes))


def exchanges(group: Group, dtype: torch.dtype) -> None:
    n, me = group.size, group.index
    for sizes in SIZES[n]:
        for dim in (0, 1):
            shapes = [(s, 2) if dim == 0 else (2, s, 3) for s in sizes]
            parts = [sample(dtype, shapes[r], r) for r in range(n)]
            got = wait(collectives.all_gather_start(parts[me], dim, sizes, group))
            expect(got, np.concatenate([array(p) for p in parts], dim), dtype, (dim, sizes))
        for dim, to in ((0, 1), (1, 0), (0, 0), (1, 2)):
            # Cut `dim`, which is whole, and join `to`, which is cut; on one dim pieces just move.
            joins = SIZES[n][1] if dim != to else [sizes[me]] * n
            shapes = [[2, 2, 2] for _ in range(n)]
            for r in range(n):
                shapes[r][dim] = sum(sizes)
                if dim != to:
                    shapes[r][to] = joins[r]
            parts = [sample(dtype, shapes[r], r) for r in range(n)]
            got = wait(collectives.all_to_all_start(parts[me], dim, sizes, to, joins, group))
            cuts = [np.split(array(p), np.cumsum(sizes)[:-1], dim)[me] for p in parts]
            expect(got, np.concatenate(cuts, to), dtype, (dim, to, sizes))
    for root in range(n):
        for shape in ((), (0, 3), (7,), (2, 3, 1)):
            x = sample(dtype, shape if me == root else (me + 1, 2), me)
            before = x.clone()
            got = wait(collectives.broadcast_start(x, root, shape, group))
            expect(got, array(sample(dtype, shape, root)), dtype, ("broadcast", root, shape))
            got.zero_()
            assert torch.equal(x, before), "the result has memory of its own, on the root too"
    ring = RINGS[n]
    got = wait(collectives.permute_start(sample(dtype, (2, 3), me), ring, (3, 2), group))
    source = next((s for s, t in ring if t == me), None)
    want = np.zeros((3, 2)) if source is None else array(sample(dtype, (3, 2), source))
    expect(got, want, dtype, "permute")


def every_kind(rank: int, transport: str, n: int) -> str:
    group = groups_over(transport).world
    for dtype in DTYPES:
        reductions(group, dtype)
        exchanges(group, dtype)
    return type(group.transport).__name__


@pytest.mark.procs
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [2, 3])
def test_every_collective_dtype_and_size(n: int, transport: str) -> None:
    names = run_ranks(n, every_kind, transport, n)
    assert set(names) == {"SharedMemoryTransport" if transport == "auto" else "ProcessGroupTransport"}


def strided(x: Tensor, kind: str) -> Tensor:
    """A tensor equal to `x`, (4, 6), that is not dense."""
    if kind == "column":
        return torch.full((4, 12), torch.nan).index_copy(1, torch.arange(0, 12, 2), x)[:, ::2]
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "stepped":
        return torch.full((8, 6), torch.nan).index_copy(0, torch.arange(0, 8, 2), x)[::2]
    return x[:1].expand(4, 6)


def not_contiguous(rank: int, transport: str) -> None:
    """Case 50: gloo sends a column or a stepped slice as if it were dense."""
    group = groups_over(transport).world
    for kind in ("column", "transposed", "stepped", "expanded"):
        x = strided(torch.arange(24.0).view(4, 6) + rank, kind)
        dense, before = x.clone(memory_format=torch.contiguous_format), x.clone()
        assert not x.is_contiguous()
        for start in (
            lambda t: collectives.all_reduce_start(t, "sum", group),
            lambda t: collectives.all_gather_start(t, 1, [6, 6], group),
            lambda t: collectives.reduce_scatter_start(t, 1, [2, 4], "sum", group),
            lambda t: collectives.all_to_all_start(t, 0, [3, 1], 1, [6, 6], group),
            lambda t: collectives.permute_start(t, [(0, 1), (1, 0)], (4, 6), group),
            lambda t: collectives.broadcast_start(t, 1, (4, 6), group),
        ):
            assert torch.equal(wait(start(x)), wait(start(dense)))
            assert torch.equal(x, before)
        made = wait(collectives.broadcast_start(x, 1, (4, 6), group))
        want = torch.arange(24.0).view(4, 6) + 1
        assert torch.equal(made, want[:1].expand(4, 6) if kind == "expanded" else want)
    image = torch.arange(48.0).view(1, 3, 4, 4).to(memory_format=torch.channels_last)
    assert torch.equal(wait(collectives.all_reduce_start(image, "sum", group)), image * 2)
    pair = torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0] + torch.tensor([0.0, 1.0]) * rank
    assert wait(collectives.all_reduce_start(pair, "sum", group)).tolist() == [2, 5]


@pytest.mark.procs
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_strided_tensors_are_sent_right(transport: str) -> None:
    run_ranks(2, not_contiguous, transport)


def outstanding(rank: int, transport: str) -> None:
    """More than the rings hold, in two groups, waited for out of order."""
    groups = groups_over(transport)
    groups.ensure([(2, 1, 0)])
    world, back = groups.world, groups.get((2, 1, 0))
    big = torch.arange(700_000.0) + rank
    small = torch.full((3,), float(rank))
    first = collectives.all_reduce_start(big, "sum", world)
    rest = [collectives.all_reduce_start(small + i, "sum", world) for i in range(30)]
    turned = collectives.all_gather_start(big, 0, [700_000] * 3, back)
    moved = collectives.permute_start(big, [(0, 1), (1, 2), (2, 0)], (700_000,), world)
    shown = [collectives.broadcast_start(big, root, (700_000,), back) for root in (2, 0)]
    split = collectives.reduce_scatter_start(big, 0, [300_000, 0, 400_000], "sum", back)
    assert torch.equal(wait(moved), torch.arange(700_000.0) + (rank - 1) % 3)
    for i in reversed(range(30)):
        assert wait(rest[i]).tolist() == [3 + 3 * i] * 3
    assert torch.equal(wait(turned)[::700_000], torch.tensor([2.0, 1.0, 0.0]))
    assert torch.equal(wait(shown[1]), torch.arange(700_000.0) + 2)
    assert torch.equal(wait(shown[0]), torch.arange(700_000.0))
    total = 3 * torch.arange(700_000.0) + 3
    assert torch.equal(wait(first), total)
    cut = total.split([300_000, 0, 400_000])[back.index]
    assert torch.equal(wait(split), cut) and torch.equal(wait(split), cut)


@pytest.mark.procs
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_at_once_in_any_order_of_waits(transport: str) -> None:
    run_ranks(3, outstanding, transport)


def reduced_where_they_lie(rank: int, transport: str, slow: int) -> None:
    """Longer than the rings, while one rank is late: no part is overwritten before all have read it."""
    group = groups_over(transport).world
    whole = [torch.arange(1_000_000.0) * (r + 1) for r in range(group.size)]
    for i in range(3):
        xs = [whole[rank] + i, whole[rank][:5] + i]
        if rank == slow:
            time.sleep(0.05)
        under_way = collectives.all_reduce_many_start(xs, "sum", group, over=True)
        alone = collectives.all_reduce_start(mine := whole[rank] - i, "avg", group, over=True)
        assert torch.equal(wait(alone), sum(whole) / group.size - i)
        for got, size in zip(under_way.wait(), (1_000_000, 5), strict=True):
            assert torch.equal(got, (sum(whole) + group.size * i)[:size])
        if transport in ("auto", "rings"):
            assert wait(alone).data_ptr() == mine.data_ptr()


@pytest.mark.procs
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_result_replaces_an_operand_that_is_given_up(transport: str) -> None:
    for slow in range(2):
        run_ranks(2, reduced_where_they_lie, transport, slow)


def noise(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(100_003, generator=generator, dtype=torch.float64).to(dtype)


def bits(rank: int) -> None:
    """Reductions go in member order and 16-bit sums are rounded once, so every bit is known."""
    group, sizes = Groups.of_default().world, [100_000, 1, 2]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for op in ("sum", "prod", "avg"):
            want = reduce_in_order([noise(r, dtype) for r in range(3)], op)
            got = wait(collectives.all_reduce_start(noise(rank, dtype), op, group))
            assert torch.equal(got, want), (dtype, op)
            got = wait(collectives.reduce_scatter_start(noise(rank, dtype), 0, sizes, op, group))
            assert torch.equal(got, want.split(sizes)[rank]), (dtype, op)
    for op in ("max", "min"):
        nan = torch.tensor([1.0, torch.nan if rank == 1 else 0.0])
        got = wait(collectives.all_reduce_start(nan, op, group))
        assert got.isnan().tolist() == [False, True]


@pytest.mark.procs
def test_every_rank_gets_the_same_bits_through_shared_memory() -> None:
    run_ranks(3, bits)


@pytest.mark.fake
def test_a_group_of_one_hands_its_input_back() -> None:
    alone, x = Group((3,), rank=3), torch.arange(6.0).view(2, 3)
    assert wait(collectives.all_reduce_start(x, "sum", alone)) is x
    assert wait(collectives.all_gather_start(x, 1, [3], alone)) is x
    assert wait(collectives.reduce_scatter_start(x, 0, [2], "avg", alone)) is x
    assert wait(collectives.all_to_all_start(x, 0, [2], 1, [3], alone)) is x
    assert wait(collectives.broadcast_start(x, 0, (2, 3), alone)) is x
    assert wait(collectives.permute_start(x, [(0, 0)], (6,), alone)).tolist() == list(range(6))
    assert wait(collectives.permute_start(x, [], (2,), alone)).tolist() == [0, 0]


@pytest.mark.fake
def test_a_rank_outside_the_group_is_refused() -> None:
    """Case 51: in stock torch such a call does nothing."""
    x = torch.ones(2)
    for group, reason in ((Group((0, 1), rank=2), "contain"), (Group((0, 1), rank=1), "connected")):
        for start in (
            lambda g: collectives.all_reduce_start(x, "sum", g),
            lambda g: collectives.all_gather_start(x, 0, [2, 2], g),
            lambda g: collectives.reduce_scatter_start(x, 0, [1, 1], "sum", g),
            lambda g: collectives.all_to_all_start(x, 0, [1, 1], 0, [1, 1], g),
            lambda g: collectives.permute_start(x, [(0, 1)], (2,), g),
            lambda g: collectives.broadcast_start(x, 0, (2,), g),
        ):
            with pytest.raises(RunError, match=rf"rank {group.rank}: group 0-1 .*{reason}"):
                start(group)


@pytest.mark.fake
@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("op: got 'mean'", lambda x, g: collectives.all_reduce_start(x, "mean", g)),
        ("max or min for bool", lambda x, g: collectives.all_reduce_start(x > 0, "sum", g)),
        ("op: got 'avg'", lambda x, g: collectives.all_reduce_start(x.int(), "avg", g)),
        ("sizes", lambda x, g: collectives.all_gather_start(x, 0, [3], g)),
        ("sizes", lambda x, g: collectives.all_gather_start(x, 2, [2], g)),
        ("sizes", lambda x, g: collectives.reduce_scatter_start(x, 1, [2], "sum", g)),
        ("split_sizes", lambda x, g: collectives.all_to_all_start(x, 0, [1], 1, [3], g)),
        ("concat_sizes", lambda x, g: collectives.all_to_all_start(x, 0, [2], 1, [2], g)),
        ("root: got 1", lambda x, g: collectives.broadcast_start(x, 1, (2, 3), g)),
        ("root: got -1", lambda x, g: collectives.broadcast_start(x, -1, (2, 3), g)),
        ("root_shape", lambda x, g: collectives.broadcast_start(x, 0, (3, 2), g)),
        ("sends", lambda x, g: collectives.permute_start(x, [(0, 0), (0, 0)], (2, 3), g)),
    ],
)
def test_arguments_that_make_no_sense_are_refused(message: str, call: Any) -> None:
    with pytest.raises(UserError, match=message):
        call(torch.ones(2, 3), Group((0,), rank=0))
