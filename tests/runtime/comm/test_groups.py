"""Groups are made by their members only; who stays away is named at the deadline."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from hyperparallel.errors import PlanError, RunError, UserError
from hyperparallel.layout import Mesh
from hyperparallel.runtime.comm.collectives import all_reduce_start, wait
from hyperparallel.runtime.comm.group import PeerLost
from hyperparallel.runtime.comm.groups import Group, Groups
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session
from tests.ranks import run_ranks

pytestmark = [pytest.mark.procs, pytest.mark.timeout(60)]


def total(group: Group, x: float) -> float:
    return float(wait(all_reduce_start(torch.tensor([x]), "sum", group)))


@pytest.mark.parametrize("transport", ["auto", "messages"])
def test_groups_that_overlap_need_their_members_only(transport: str) -> None:
    """Rank 0 asks for one group, others for more, in other orders; rank 3 for none but a pair."""
    wanted: dict[int, list[tuple[int, ...]]] = {
        0: [(0, 1)],
        1: [(2, 1), (0, 1), (1, 2)],
        2: [(1, 2), (3, 2), (2, 1)],
        3: [(3, 2)],
    }

    def run(rank: int) -> dict[tuple[int, ...], float]:
        groups = Groups.of_default(transport=transport)
        groups.ensure(wanted[rank])
        return {ranks: total(groups.get(ranks), 10.0**rank) for ranks in sorted(wanted[rank])}

    for rank, found in enumerate(run_ranks(4, run)):
        assert found == {ranks: sum(10.0**r for r in ranks) for ranks in wanted[rank]}


def test_equal_groups_of_two_registries_are_apart() -> None:
    def run(rank: int) -> tuple[float, float]:
        first, second = Groups.of_default(), Groups.of_default()
        if rank < 2:
            first.ensure([(0, 1)])
        second.ensure([(0, 1), (0, 2)])
        return (total(first.get((0, 1)), 1.0) if rank < 2 else 0.0), total(second.world, 1.0)

    assert run_ranks(3, run) == [(2.0, 3.0), (2.0, 3.0), (0.0, 3.0)]


@pytest.mark.parametrize("transport", ["auto", "messages"])
def test_channels_of_the_same_ranks_do_not_wait_for_each_other(transport: str) -> None:
    """Each rank waits for the one channel before it starts the other, in opposite orders."""

    def run(rank: int) -> list[float]:
        groups = Groups.of_default(transport=transport)
        for channel in ("up", "down"):
            groups.ensure([(0, 1)], channel)
        up, down = (groups.get((0, 1), channel) for channel in ("up", "down"))
        started = [all_reduce_start(torch.tensor([float(rank)]), "sum", up if rank else down)]
        started.append(all_reduce_start(torch.tensor([10.0]), "sum", down if rank else up))
        assert up is not down and up.name != down.name
        return [float(wait(one)) for one in started]

    # Through one group the calls would meet in the order of starting, and give 10 and 11.
    assert run_ranks(2, run) == [[10.0, 11.0], [11.0, 10.0]]


def test_a_member_that_stays_away_is_named_at_the_deadline() -> None:
    def run(rank: int) -> str:
        groups = Groups.of_default(timeout=timedelta(seconds=1))
        if rank == 1:
            time.sleep(3)
            return ""
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 did not come within 1 s to connect group 0-1-2 x"):
            groups.ensure([(0, 1, 2)], "x")
        return "named" if time.monotonic() - began < 3 else "late"

    assert run_ranks(3, run) == ["named", "", "named"]


def test_the_deadline_of_a_job_is_that_of_every_mesh_in_it() -> None:
    """`launch(collective_timeout=...)`, or the user's own `init_process_group(timeout=...)`."""

    def run(session: Session) -> list[float]:
        here = Here.in_job(Mesh((2,), ("dp",)))
        return [groups.timeout.total_seconds() for groups in (session.groups, here.groups)]

    assert launch(run, 2, threads=1, collective_timeout=timedelta(seconds=7)) == [[7.0, 7.0]] * 2


def test_what_a_registry_refuses() -> None:
    groups = Groups(rank=0, world_size=2)
    with pytest.raises(UserError, match="ranks below 2"):
        groups.ensure([(0, 2)])

    def run(rank: int) -> None:
        real = Groups.of_default()
        with pytest.raises(UserError, match=r"a group that Groups.ensure made"):
            real.get((0, 1, 2))
        real.ensure([(0, 2)])
        if rank == 1:
            with pytest.raises(RunError, match="does not contain this rank"):
                all_reduce_start(torch.ones(1), "sum", real.get((0, 2)))

    run_ranks(3, run)


def test_a_rank_outside_a_mesh_is_told_so() -> None:
    def run(rank: int) -> Any:
        mesh = Mesh((2,), ("tp",), ranks=(0, 2))
        if rank != 1:
            here = Here.in_job(mesh)
            here.barrier()
            return here.mesh_group.ranks, here.is_first
        with pytest.raises(PlanError, match=r"ranks=\(0, 2\).*rank 1 of the job's 3.*if rank in mesh"):
            Here.in_job(mesh)
        with pytest.raises(PlanError, match=r"the job's 3 ranks \(0 to 2\)"):
            Here.in_job(Mesh((2,), ("tp",), ranks=(1, 5)))
        return None

    assert run_ranks(3, run) == [((0, 2), True), None, ((0, 2), False)]
