"""Every collective and dtype on NCCL groups of one to all devices, and on gloo, against plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperparallel.graph.collective_table import reduce_in_order
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.collectives import wait
from hyperparallel.runtime.comm.group import Group
from hyperparallel.runtime.job.session import Session
from tests.gpu.places import Place, keep_busy, places, side_stream
from tests.runtime.comm.test_collectives import DTYPES, ops_of, sample

IN_16_BITS = 1e-2  # averages are rounded; other results are small whole numbers, hence exact


def sizes_of(n: int) -> list[list[int]]:
    """Even, uneven and empty pieces of n members."""
    return [[2] * n, [(3, 0, 2)[i % 3] for i in range(n)], [*[0] * (n - 1), 4]]


def expect(got: Tensor, want: Tensor, session: Session, what: object) -> None:
    assert got.device == session.device and got.dtype == want.dtype, what
    limit = IN_16_BITS if want.dtype in (torch.bfloat16, torch.float16) else 1e-6
    torch.testing.assert_close(got.cpu(), want, rtol=limit, atol=0, msg=lambda text: f"{what}: {text}")


def parts_of(dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [sample(dtype, shape, rank) for rank, shape in enumerate(shapes)]


def reductions(session: Session, group: Group, dtype: torch.dtype) -> None:
    n, me = group.size, group.index
    for op in ops_of(dtype):
        for shape in ((), (0,), (7,), (3, 5)):
            parts = parts_of(dtype, [shape] * n)
            got = wait(collectives.all_reduce_start(parts[me].to(session.device), op, group))
            expect(got, reduce_in_order(parts, op), session, (dtype, op, shape))
        for sizes in sizes_of(n):
            for dim, shape in ((0, (sum(sizes), 2)), (1, (2, sum(sizes), 3))):
                parts = parts_of(dtype, [shape] * n)
                x = parts[me].to(session.device)
                got = wait(collectives.reduce_scatter_start(x, dim, sizes, op, group))
                want = reduce_in_order(parts, op).split(sizes, dim)[me]
                expect(got, want.contiguous(), session, (dtype, op, dim, sizes))


def exchanges(session: Session, group: Group, dtype: torch.dtype) -> None:
    n, me, device = group.size, group.index, session.device
    for sizes in sizes_of(n):
        for dim in (0, 1):
            parts = parts_of(dtype, [(s, 2) if dim == 0 else (2, s, 3) for s in sizes])
            got = wait(collectives.all_gather_start(parts[me].to(device), dim, sizes, group))
            expect(got, torch.cat(parts, dim), session, (dtype, "gather", dim, sizes))
        parts = parts_of(dtype, [(sum(sizes), own, 3) for own in sizes_of(n)[1]])
        got = wait(collectives.all_to_all_start(parts[me].to(device), 0, sizes, 1, sizes_of(n)[1], group))
        want = torch.cat([part.split(sizes, 0)[me] for part in parts], 1)
        expect(got, want, session, (dtype, "exchange", sizes))
    ring = [(i, (i + 1) % n) for i in range(n)]
    for sends in (ring, ring[:1], [(0, target) for target in range(1, n)], []):
        parts = parts_of(dtype, [(2, 3)] * n)
        got = wait(collectives.permute_start(parts[me].to(device), sends, (3, 2), group))
        source = next((s for s, t in sends if t == me), None)
        want = torch.zeros(3, 2, dtype=dtype) if source is None else parts[source].view(3, 2)
        expect(got, want, session, (dtype, "permute", sends))


def many_as_one(session: Session, group: Group) -> None:
    n, me = group.size, group.index
    first, second = sizes_of(n)[:2]
    wholes = [sample(torch.float32, (sum(first), 3), 1), sample(torch.float32, (2, sum(second)), 2)]
    pieces = [wholes[0].split(first, 0)[me], wholes[1].split(second, 1)[me]]
    xs = [x.to(session.device) for x in pieces]
    for got, want in zip(
        collectives.all_gather_many_start(xs, [0, 1], [first, second], group).wait(), wholes, strict=True
    ):
        expect(got, want, session, "gather many")
    xs = [x.to(session.device) for x in wholes]
    found = collectives.reduce_scatter_many_start(xs, [0, 1], [first, second], "sum", group).wait()
    for got, want in zip(found, pieces, strict=True):
        expect(got, want * n, session, "scatter many")


def every_kind(session: Session) -> None:
    world = session.groups.world
    back = tuple(reversed(range(session.world_size)))
    halves = [back[: len(back) // 2], back[len(back) // 2 :]]
    session.groups.ensure([back, *filter(None, halves)])
    mine = next(half for half in halves if session.rank in half)
    for group in (world, session.groups.get(back), session.groups.get(mine)):
        for dtype in DTYPES:
            reductions(session, group, dtype)
            exchanges(session, group, dtype)
        many_as_one(session, group)


@places(3)
def test_every_collective_equals_arithmetic(place: Place) -> None:
    place.run(every_kind)


def strided(session: Session) -> None:
    """Inputs that are not dense, and are not written to."""
    n, group = session.world_size, session.groups.world
    whole = torch.arange(8.0 * n, device=session.device).view(2 * n, 4)
    for x in (whole[:, ::2], whole.t().contiguous().t(), whole[:1].expand(2 * n, 4), whole[::2]):
        dense, before = x.clone(memory_format=torch.contiguous_format), x.clone()
        starts: list[Any] = [
            lambda t: collectives.all_reduce_start(t, "sum", group),
            lambda t: collectives.all_gather_start(t, 1, [t.shape[1]] * n, group),
            lambda t: collectives.permute_start(t, [(i, (i + 1) % n) for i in range(n)], t.shape, group),
        ]
        if x.shape[0] == 2 * n:
            starts.append(lambda t: collectives.reduce_scatter_start(t, 0, [2] * n, "sum", group))
            starts.append(lambda t: collectives.all_to_all_start(t, 0, [2] * n, 1, [t.shape[1]] * n, group))
        for start in starts:
            torch.testing.assert_close(wait(start(x)), wait(start(dense)), rtol=0, atol=0)
            assert torch.equal(x, before)


@places(2)
def test_strided_inputs(place: Place) -> None:
    place.run(strided)


SIZE = 1 << 20


def ordered(session: Session) -> None:
    """Starts see what was queued before them, and waits hold what is queued behind them, on any stream."""
    device, group, n = session.device, session.groups.world, session.world_size
    for turn in range(8):
        x = torch.zeros(SIZE, device=device)
        keep_busy(device)
        x += session.rank + turn
        with side_stream(device):
            first = collectives.all_reduce_start(x, "sum", group)
            second = collectives.all_gather_start(x, 0, [SIZE] * n, group)
            gathered = wait(second)
            reduced = wait(first)
            doubled = reduced * 2
        total = float(sum(range(n)) + n * turn)
        assert float(reduced.sum()) == total * SIZE and float(doubled.max()) == 2 * total
        assert gathered.view(n, SIZE)[:, -1].tolist() == [rank + turn for rank in range(n)]


@places(2)
def test_order_holds_on_side_streams(place: Place) -> None:
    place.run(ordered)


def freed(session: Session) -> None:
    """The memory of an input that is let go of between start and wait is not given to others."""
    device, group, n = session.device, session.groups.world, session.world_size
    for turn in range(8):
        x = torch.full((SIZE,), float(session.rank + turn), device=device)
        keep_busy(device)
        started = [
            collectives.all_gather_start(x, 0, [SIZE] * n, group),
            collectives.permute_start(x, [(i, (i + 1) % n) for i in range(n)], (SIZE,), group),
            collectives.reduce_scatter_start(x, 0, [SIZE, *[0] * (n - 1)], "sum", group),
        ]
        del x
        others = [torch.full((SIZE,), -1.0, device=device) for _ in range(8)]
        scattered, moved, gathered = (wait(one) for one in reversed(started))
        assert gathered.view(n, SIZE).sum(1).tolist() == [(rank + turn) * SIZE for rank in range(n)]
        assert moved.unique().tolist() == [(session.rank - 1) % n + turn]
        assert scattered.unique().tolist() == ([sum(range(n)) + n * turn] if session.rank == 0 else [])
        assert all(float(other.max()) == -1.0 for other in others)


@places(2)
def test_inputs_freed_before_the_wait(place: Place) -> None:
    place.run(freed)
