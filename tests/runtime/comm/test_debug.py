"""Members that make different collectives are told so (case 51), checked mode or not."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from hyperparallel.errors import RunError
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.collectives import wait
from hyperparallel.runtime.comm.debug import disagreement
from hyperparallel.runtime.comm.group import Group, PeerLost
from hyperparallel.runtime.comm.groups import Groups
from tests.ranks import run_ranks

Calls = Callable[[int, Group], Any]


def sizes_differ(rank: int, group: Group) -> None:
    wait(collectives.all_reduce_start(torch.ones(2 + rank), "sum", group))


def dtypes_differ(rank: int, group: Group) -> None:
    x = torch.ones(2, dtype=(torch.float32, torch.float64)[rank])
    wait(collectives.all_gather_start(x, 0, [2, 2], group))


def order_differs(rank: int, group: Group) -> None:
    x = torch.ones(4)
    calls: list[Callable[[], object]] = [
        lambda: wait(collectives.all_reduce_start(x, "sum", group)),
        lambda: wait(collectives.all_gather_start(x, 0, [4, 4], group)),
    ]
    for call in calls[:: 1 - 2 * rank]:
        call()


def roots_differ(rank: int, group: Group) -> None:
    wait(collectives.broadcast_start(torch.ones(2), rank, (2,), group))
    wait(collectives.all_reduce_start(torch.ones(2), "sum", group))


MISTAKES = (
    (sizes_differ, "shape differs", r"all_reduce of torch.float32 \({}"),
    (dtypes_differ, "dtype differs", "all_gather of torch.float"),
    (roots_differ, "root differs", "broadcast of torch.float32"),
    (order_differs, "collective differs", "all_reduce of torch.float32"),
)


@pytest.mark.procs
@pytest.mark.parametrize(("calls", "why", "what"), MISTAKES)
def test_checked_mode_names_op_ranks_and_shapes(
    calls: Calls, why: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPERPARALLEL_DEBUG", "collectives")

    def both(rank: int) -> str:
        group = Groups.of_default().world
        assert wait(collectives.all_reduce_start(torch.ones(1), "sum", group)).item() == 2
        started = time.monotonic()
        with pytest.raises(RunError) as caught:
            calls(rank, group)
        assert time.monotonic() - started < 10
        return str(caught.value)

    for text in run_ranks(2, both):
        assert why in text and "rank 0: " in text and "rank 1: " in text
        assert what.format("2")[:10] in text and "test_debug.py:" in text


@pytest.mark.procs
@pytest.mark.parametrize(("calls", "why", "what"), MISTAKES)
def test_shared_memory_notices_without_being_asked(calls: Calls, why: str, what: str) -> None:
    def both(rank: int) -> None:
        calls(rank, Groups.of_default().world)

    with pytest.raises(RunError, match=r"made another collective.*it sent (all_|broad)"):
        run_ranks(2, both)


@pytest.mark.procs
def test_checked_collectives_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERPARALLEL_DEBUG", "collectives")

    def all_kinds(rank: int) -> None:
        group = Groups.of_default().world
        x = torch.arange(6.0).view(2, 3) + rank
        wait(collectives.all_gather_start(x[: 1 + rank], 0, [1, 2], group))
        wait(collectives.reduce_scatter_start(x, 1, [1, 2], "sum", group))
        wait(collectives.all_to_all_start(x, 1, [1, 2], 0, [2, 2], group))
        wait(collectives.broadcast_start(x[rank:], 1, (1, 3), group))
        wait(collectives.permute_start(x, [(0, 1)], (3, 2) if rank else (0,), group))

    run_ranks(2, all_kinds)


@pytest.mark.procs
@pytest.mark.parametrize("channels", [("up", "down"), ("", "")])
def test_groups_of_the_same_ranks_are_checked_apart(
    channels: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two channels, or two registries; one member is done with the first group's call, the other not yet."""
    monkeypatch.setenv("HYPERPARALLEL_DEBUG", "collectives")

    def run(rank: int) -> list[float]:
        pair = [Groups.of_default() for _ in channels]
        for groups, channel in zip(pair, channels, strict=True):
            groups.ensure([(0, 1)], channel)
        one, two = (groups.get((0, 1), channel) for groups, channel in zip(pair, channels, strict=True))
        x = torch.tensor([1.0 + rank])
        first = wait(collectives.all_reduce_start(x, "sum", one))
        time.sleep(0.2 * rank)
        return [*first.tolist(), *wait(collectives.all_gather_start(x, 0, [1, 1], two)).tolist()]

    assert run_ranks(2, run) == [[3.0, 1.0, 2.0]] * 2


@pytest.mark.procs
def test_who_makes_no_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERPARALLEL_DEBUG", "collectives")

    def run(rank: int) -> str:
        group = Groups.of_default(timeout=timedelta(seconds=2)).world
        if rank == 1:
            time.sleep(4)
            return ""
        with pytest.raises(PeerLost) as caught:
            wait(collectives.all_reduce_start(torch.ones(1), "sum", group))
        return str(caught.value)

    assert "rank 1 did not come within 2 s to make call 1 (all_reduce) in group world" in run_ranks(3, run)[0]


def call(**changes: Any) -> dict[str, Any]:
    return {"collective": "all_to_all", "dtype": "torch.int64", "shape": [4, 6], **changes}


@pytest.mark.fake
def test_sizes_of_an_exchange_must_fit_pairwise() -> None:
    sender = call(split_dim=0, split_sizes=[1, 3], concat_dim=1, concat_sizes=[6, 5])
    receiver = call(shape=[4, 5], split_dim=0, split_sizes=[1, 3], concat_dim=1)
    assert disagreement([sender, receiver | {"concat_sizes": [6, 5]}]) == ""
    wrong = disagreement([sender, receiver | {"concat_sizes": [5, 5]}])
    assert wrong == "member 1 expects another size than member 0 sends"
    gather = call(collective="all_gather", dim=0, sizes=[4, 2])
    assert disagreement([gather, gather | {"shape": [2, 6]}]) == ""
    assert disagreement([gather, gather | {"shape": [2, 5]}]) == "shape differs"
    shown = call(collective="broadcast", root=1, root_shape=[4, 5])
    assert disagreement([shown, shown | {"shape": [4, 5]}]) == ""
    wrong = disagreement([shown | {"shape": [4, 5]}, shown])
    assert wrong == "root_shape is not the shape of the root's operand"
    assert disagreement([shown, shown | {"shape": [4, 5], "root": 0}]) == "root differs"
    moves = call(collective="permute", sends=[[0, 1]], recv_shape=[0])
    assert disagreement([moves, moves | {"recv_shape": [24]}]) == ""
    assert "expects another size" in disagreement([moves, moves | {"recv_shape": [23]}])
