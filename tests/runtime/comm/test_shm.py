"""Shared memory: what is under way outlives its transport, and waits end in time whatever interrupts them."""

from __future__ import annotations

import gc
import signal
import time
import weakref
from datetime import timedelta

import pytest
import torch

from hyperparallel.runtime.comm.collectives import all_reduce_start, wait
from hyperparallel.runtime.comm.group import PeerLost
from hyperparallel.runtime.comm.groups import Groups
from tests.ranks import run_ranks

pytestmark = [pytest.mark.procs, pytest.mark.timeout(60)]


def test_tensors_of_a_collective_that_nobody_waits_for_live_until_it_is_over() -> None:
    """Rank 0 drops one with its group, as after an error; a wait in another group still moves its bytes."""

    def run(rank: int) -> tuple[bool, float]:
        groups, other = Groups.of_default(), Groups.of_default()
        groups.ensure([(0, 1)], "dropped")
        other.ensure([(0, 1)], "other")
        if rank == 1:
            time.sleep(1)
        pending = all_reduce_start(torch.ones(100_000), "sum", groups.get((0, 1), "dropped"))
        if rank == 1:
            wait(pending)
            return True, float(wait(all_reduce_start(torch.ones(1), "sum", other.get((0, 1), "other"))))
        memory = weakref.ref(pending.result)  # type: ignore[attr-defined]
        del pending, groups
        gc.collect()
        alive = memory() is not None
        return alive, float(wait(all_reduce_start(torch.ones(1), "sum", other.get((0, 1), "other"))))

    assert run_ranks(2, run) == [(True, 2.0)] * 2


def test_signals_do_not_put_off_the_deadline() -> None:
    """A profiler's timer interrupts rank 0 a hundred times a second while rank 1 stays away."""

    def run(rank: int) -> float:
        group = Groups.of_default(timeout=timedelta(seconds=1.5)).world
        if rank == 1:
            time.sleep(5)
            return 0.0
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 did not take part within 1.5 s"):
            wait(all_reduce_start(torch.ones(1), "sum", group))
        signal.setitimer(signal.ITIMER_REAL, 0)
        return time.monotonic() - began

    assert 1.4 < run_ranks(2, run)[0] < 4
