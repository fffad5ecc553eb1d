"""What is asked of the operating system: memory that a training process keeps, ends of processes."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from hyperparallel.runtime import host
from tests.ranks import run_ranks


def faults_of(step: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults_after_warm_up(rank: int) -> int:
    def step() -> None:
        tensors = [torch.ones(1 << 20) for _ in range(8)]  # 4 MB each, above glibc's threshold
        del tensors

    return min(faults_of(step) for _ in range(8))  # the heap of a forked process settles first


@pytest.mark.fake
def test_a_number_that_an_ended_process_had_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    signalled: list[int] = []
    monkeypatch.setattr(host.os, "kill", lambda pid, number: signalled.append(pid))
    host.signal_group(ended.pid, signal.SIGKILL, has_ended=True)
    assert signalled == []
    host.signal_group(ended.pid, signal.SIGKILL)  # one that leads no group yet
    assert signalled == [ended.pid]


@pytest.mark.procs
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_ranks_do_not_page_the_same_memory_in_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert max(run_ranks(2, faults_after_warm_up)) < 100
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # somebody tunes it: left alone
    assert not host.keep_freed_memory()
