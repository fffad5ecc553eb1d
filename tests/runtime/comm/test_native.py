"""The native library is built once, privately; without it the job runs on messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hyperparallel.errors import UserError
from hyperparallel.runtime.comm import native
from hyperparallel.runtime.comm.collectives import all_reduce_start, wait
from hyperparallel.runtime.comm.groups import Groups
from tests.ranks import run_ranks


@pytest.mark.fake
def test_a_build_is_kept_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FLAGS", ("-O0", "-std=c++17", "-shared", "-fPIC"))
    first = native.build_library(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert native.build_library(tmp_path) == first and first.stat().st_mtime_ns == stamp
    assert sorted(os.listdir(tmp_path)) == sorted(["lock", first.name])


@pytest.mark.fake
def test_a_failed_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLAGS", ("-O0", "-no-such-flag"))
    with pytest.raises(native.BuildError, match="no-such-flag"):
        native.build_library(tmp_path)
    assert os.listdir(tmp_path) == ["lock"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(native.BuildError, match="no C\\+\\+ compiler"):
        native.build_library(tmp_path)


@pytest.mark.procs
def test_one_rank_without_a_library_sends_all_to_messages() -> None:
    def job(rank: int) -> tuple[str, float]:
        if rank == 1:

            def missing() -> None:
                raise native.BuildError("no compiler on this rank")

            native.library = missing  # type: ignore[assignment]
        group = Groups.of_default().world
        total = wait(all_reduce_start(torch.ones(()), "sum", group))
        return type(group.transport).__name__, total.item()

    assert run_ranks(2, job) == [("ProcessGroupTransport", 2.0)] * 2


@pytest.mark.procs
def test_the_transport_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(rank: int) -> str:
        return type(Groups.of_default().world.transport).__name__

    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", "messages")
    assert run_ranks(2, kind) == ["ProcessGroupTransport"] * 2
    wrong = {
        "HYPERPARALLEL_TRANSPORT": ("pigeons", r"^HYPERPARALLEL_TRANSPORT: got 'pigeons'.*auto or mess"),
        "HYPERPARALLEL_DEBUG": ("collective", r"^HYPERPARALLEL_DEBUG: got 'collective'.*=collectives"),
        "HYPERPARALLEL_CARRIER": ("messages", r"^environment: got 'HYPERPARALLEL_CARRIER'; allowed: HYPER"),
    }
    for name, (value, words) in wrong.items():
        with monkeypatch.context() as patch, pytest.raises(UserError, match=words):
            patch.setenv(name, value)
            run_ranks(2, kind)
