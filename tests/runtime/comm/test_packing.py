"""Collectives of many tensors: flat messages and single ones give what each tensor alone would."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperparallel.errors import UserError
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.collectives import wait
from hyperparallel.runtime.comm.group import Group
from hyperparallel.runtime.comm.groups import Groups
from hyperparallel.runtime.comm.packing import (
    packed_pieces,
    packed_whole,
    totals,
    unpacked_pieces,
    unpacked_whole,
)
from hyperparallel.runtime.comm.process_group import DIRECT_BYTES, ProcessGroupTransport
from tests.ranks import run_ranks
from tests.runtime.comm.transports import TRANSPORTS, groups_over

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def drawn(n: int, seed: int) -> tuple[list[tuple[int, ...]], list[int], list[list[int]]]:
    """Whole shapes, dims and sizes of some tensors cut for n members, uneven and empty ones too."""
    draw = random.Random(seed)
    shapes, dims, sizes = [], [], []
    for _ in range(draw.randint(1, 5)):
        parts = [draw.randint(0, 4) for _ in range(n)]
        shape = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        dim = draw.randrange(len(shape))
        shape[dim] = sum(parts)
        shapes.append(tuple(shape))
        dims.append(dim)
        sizes.append(parts)
    return shapes, dims, sizes


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_all_members_make_the_message_and_the_message_the_tensors(seed: int) -> None:
    n = 1 + seed % 4
    shapes, dims, sizes = drawn(n, seed)
    xs = [torch.rand(shape) for shape in shapes]
    cut = [x.split(parts, dim) for x, dim, parts in zip(xs, dims, sizes, strict=True)]
    members = [[pieces[m] for pieces in cut] for m in range(n)]
    flat = packed_pieces(xs, dims, sizes)
    assert torch.equal(flat, torch.cat([packed_whole(mine) for mine in members]))
    for mine, count in zip(members, totals(xs, dims, sizes), strict=True):
        assert sum(piece.numel() for piece in mine) == count
    for mine in members:
        back = unpacked_pieces(flat, [piece.shape for piece in mine], dims, sizes)
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(back, xs, strict=True))
        own = unpacked_whole(packed_whole(mine), [piece.shape for piece in mine])
        assert all(torch.equal(a, b) for a, b in zip(own, mine, strict=True))


def filled(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    x = torch.arange(torch.Size(shape).numel()).remainder(5) + rank
    return (x % 2 == 0 if dtype == torch.bool else x.to(dtype)).view(shape)


def many_equal_single(rank: int, transport: str, n: int) -> list[str]:
    group = groups_over(transport).world
    for seed, dtype in enumerate(DTYPES * 4):
        shapes, dims, sizes = drawn(n, seed)
        xs = [filled(shape, dtype, rank) for shape in shapes]
        mine = [x.split(p, d)[group.index] for x, d, p in zip(xs, dims, sizes, strict=True)]  # strided
        under_way = collectives.all_gather_many_start(mine, dims, sizes, group)
        for got, *one in zip(under_way.wait(), mine, dims, sizes, strict=True):
            same(got, wait(collectives.all_gather_start(*one, group)))
        op = "max" if dtype == torch.bool else "sum"
        under_way = collectives.reduce_scatter_many_start(xs, dims, sizes, op, group)
        for got, *one in zip(under_way.wait(), xs, dims, sizes, strict=True):
            same(got, wait(collectives.reduce_scatter_start(*one, op, group)))
        mixed = [x.transpose(0, -1) if i % 2 else x for i, x in enumerate(xs)]  # strided
        for got, x in zip(collectives.all_reduce_many_start(mixed, op, group).wait(), mixed, strict=True):
            same(got, wait(collectives.all_reduce_start(x, op, group)))
    return [type(group.transport).__name__]


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and torch.equal(got, want) and got.is_contiguous()


@pytest.mark.procs
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [2, 3])
def test_many_at_once_are_what_each_is_alone(n: int, transport: str) -> None:
    run_ranks(n, many_equal_single, transport, n)


def one_message(rank: int) -> None:
    group = Groups.of_default(transport="messages").world
    transport, calls = group.transport, []
    assert isinstance(transport, ProcessGroupTransport)
    handle = transport.handle

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(handle, name)

    group.handle = Counting()
    xs = [torch.rand(3, 4), torch.rand(5), torch.rand(2, 2)]
    collectives.all_gather_many_start(xs, [1, 0, 0], [[4, 4], [5, 5], [2, 2]], group).wait()
    assert calls == ["_allgather_base"]
    calls.clear()
    xs = [torch.rand(3, 8), torch.rand(5)]
    collectives.reduce_scatter_many_start(xs, [1, 0], [[4, 4], [3, 2]], "sum", group).wait()
    assert calls == ["reduce_scatter"]
    calls.clear()
    kept = [x.clone() for x in xs]
    total = collectives.all_reduce_many_start(xs, "avg", group).wait()
    assert calls == ["alltoall_base"] and all(map(torch.equal, xs, kept)), "operands are not written to"
    assert total[0].untyped_storage().data_ptr() == total[1].untyped_storage().data_ptr()
    # A large tensor goes from where it lies; the others still share a message.
    calls.clear()
    big = torch.rand(2 * DIRECT_BYTES // 4)
    xs, half = [torch.rand(6), big, torch.rand(4, 2)], [DIRECT_BYTES // 4] * 2
    collectives.reduce_scatter_many_start(xs, [0, 0, 1], [[3, 3], half, [1, 1]], "sum", group).wait()
    assert calls == ["alltoall_base", "_reduce_scatter_base"]
    calls.clear()
    xs[1] = big[: DIRECT_BYTES // 4]
    collectives.all_gather_many_start(xs, [0, 0, 1], [[6, 6], half, [2, 2]], group).wait()
    assert calls == ["alltoall_base", "_allgather_base"]
    calls.clear()
    # What NCCL gets where pieces are uneven: one gather of pieces as long as the longest.
    calls.clear()
    x = torch.arange(6.0).view(2, 3)[:, : 3 - rank].contiguous() + rank
    padded = transport._padded_gather(x.view(-1), x.shape, 1, [3, 2]).wait()
    assert calls == ["_allgather_base"]
    assert padded.tolist() == [[0, 1, 2, 1, 2], [3, 4, 5, 4, 5]]


@pytest.mark.procs
def test_many_tensors_are_one_message() -> None:
    run_ranks(2, one_message)


def test_alone_tensors_are_handed_back_and_misfits_refused() -> None:
    alone, xs = Group((0,), rank=0), [torch.rand(2, 3), torch.rand(4)]
    for got in (
        collectives.all_gather_many_start(xs, [1, 0], [[3], [4]], alone).wait(),
        collectives.reduce_scatter_many_start(xs, [1, 0], [[3], [4]], "sum", alone).wait(),
        collectives.all_reduce_many_start(xs, "sum", alone).wait(),
    ):
        assert got[0] is xs[0] and got[1] is xs[1]
    with pytest.raises(UserError, match="sizes"):
        collectives.all_gather_many_start(xs, [1, 0], [[3], [5]], alone)
    with pytest.raises(UserError, match="sizes"):
        collectives.reduce_scatter_many_start(xs, [2, 0], [[3], [4]], "sum", alone)
    with pytest.raises(UserError, match="op"):
        collectives.reduce_scatter_many_start([torch.ones(2, dtype=torch.bool)], [0], [[2]], "sum", alone)
    with pytest.raises(UserError, match="op"):
        collectives.all_reduce_many_start([torch.ones(2, dtype=torch.bool)], "sum", alone)
