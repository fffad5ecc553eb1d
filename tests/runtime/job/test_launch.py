"""Launch ends well: results, first failures, signals, ports; nobody is left (cases 52, 53, 54)."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyperparallel.errors import RunError, UserError
from hyperparallel.layout import Layout
from hyperparallel.runtime.comm.collectives import all_reduce_start, wait
from hyperparallel.runtime.comm.group import job_device
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.job.launch import launch, start_context
from hyperparallel.runtime.job.session import (
    Ranks,
    Session,
    open_session,
    own_device,
    ranks_from_environment,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.procs


def total(session: Session, add: float = 0.0) -> float:
    x = torch.full((3,), session.rank + add)
    return float(wait(all_reduce_start(x, "sum", session.groups.world))[0])


def joins_and_leaves(ranks: Ranks) -> None:
    def threads() -> list[str]:
        names = ((task / "comm").read_text() for task in Path("/proc/self/task").iterdir())
        return [name for name in names if "gloo" in name]

    with open_session(ranks) as session:
        world = session.groups.world
        assert total(session) == 1.0 and threads()
    assert not threads()
    with pytest.raises(RunError, match="not connected"):
        all_reduce_start(torch.ones(1), "sum", world)


def gone(pid: int) -> bool:
    """Not running: no such process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def note(folder: Path, session: Session) -> None:
    """Tell the test this rank's process id."""
    (folder / f"{session.rank}.new").write_text(str(os.getpid()))
    os.replace(folder / f"{session.rank}.new", folder / f"{session.rank}.pid")


def pids(folder: Path, num_ranks: int) -> list[int]:
    files = [folder / f"{rank}.pid" for rank in range(num_ranks)]
    assert until(lambda: all(file.exists() for file in files), 20), "ranks did not start"
    return [int(file.read_text()) for file in files]


def test_results_come_in_rank_order() -> None:
    assert launch(total, 3, args=(1.0,), threads=1) == [6.0] * 3
    assert run_ranks(2, lambda rank: torch.full((2,), rank))[1].tolist() == [1, 1]
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("num_ranks", 0, {}),
        ("num_ranks", 1.5, {}),
        ("num_ranks", "2", {}),
        ("threads", 1, {"threads": 0}),
        ("collective_timeout", 1, {"collective_timeout": 5}),
    ]
    for field, num_ranks, options in wrong:
        with pytest.raises(UserError, match=f"^{field}: got"):
            launch(total, num_ranks, **options)


def test_a_quick_rank_does_not_leave_before_a_slow_one_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing its connections early broke the other's joining: 7 of 100 such runs on busy cores."""
    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", "messages")
    for _ in range(60):
        assert launch(lambda session: session.rank, 2, threads=1) == [0, 1]


def test_no_thread_of_a_process_group_outlives_its_session(tmp_path: Path) -> None:
    """One that still let go of a tensor while Python ended aborted 8 of 24 jobs on busy cores."""
    ranks = [Ranks(rank, 2, rank, str(tmp_path / "store")) for rank in range(2)]
    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=joins_and_leaves, args=(each,)) for each in ranks]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(30)
    assert [job.exitcode for job in jobs] == [0, 0]


def test_ranks_with_several_threads_start_from_a_clean_process() -> None:
    """A parallel loop in a child forked after the parent's own would hang."""
    torch.ones(300, 300) @ torch.ones(300, 300)
    assert launch(threaded, 2, threads=2, timeout=60) == [2, 2]


def threaded(session: Session) -> int:
    assert float((torch.ones(500, 500) @ torch.ones(500, 500)).sum()) == 500**3
    return torch.get_num_threads()


def fails(session: Session, folder: Path, how: str) -> None:
    note(folder, session)
    for step in range(4):
        with session.step(step):
            if session.rank == 1 and step == 2 and how == "raise":
                raise ValueError("boom")
            if session.rank == 1 and step == 2 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if session.rank == 1 and step == 2 and how == "caught":
                    with session.step(step):
                        raise ValueError("boom")
            except ValueError:
                time.sleep(100)
            total(session)


@pytest.mark.parametrize("how", ["raise", "caught", "kill"])
def test_the_first_failure_ends_all_ranks(tmp_path: Path, how: str) -> None:
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        launch(fails, 3, args=(tmp_path, how), threads=1)
    assert time.monotonic() - started < 10
    text = str(caught.value)
    if how == "kill":
        assert text.startswith("rank 1 failed in step 2: was killed by SIGKILL")
    else:
        assert text.startswith("rank 1 failed in step 2: ValueError: boom")
        assert 'raise ValueError("boom")' in text
    assert all(gone(pid) for pid in pids(tmp_path, 3))


def leaves_early(session: Session) -> None:
    if session.rank == 0:
        total(session)


def test_a_peer_that_has_left_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=r"rank 0 failed: .*PeerLost.*rank 1 died during"):
        launch(leaves_early, 2, threads=1)
    assert time.monotonic() - started < 10


def stays_away(session: Session) -> None:
    if session.rank == 1:
        time.sleep(100)
    total(session)


def test_a_peer_that_stays_away_meets_the_timeouts() -> None:
    from datetime import timedelta

    with pytest.raises(RunError, match=r"rank 1 did not take part within 1 s"):
        launch(stays_away, 2, threads=1, collective_timeout=timedelta(seconds=1))
    with pytest.raises(RunError, match=r"(?s)timeout: the run.*rank 0 is in no step.*rank 1 is in no"):
        launch(stays_away, 2, threads=1, timeout=1)


def stuck(session: Session, folder: Path) -> None:
    note(folder, session)
    try:
        if session.rank == 0:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in C, deaf to signals
        total(session)
    finally:
        (folder / f"{session.rank}.closed").touch()


@contextmanager
def launcher(folder: Path, fn: Callable[..., Any], grace: float = 1.0) -> Iterator[Any]:
    """A process of its own that launches 2 ranks; yields once both run."""

    def main() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tempfile.tempdir = str(folder / "temp")
        os.mkdir(tempfile.tempdir)
        launch(fn, 2, args=(folder,), threads=1, grace=grace)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    try:
        pids(folder, 2)
        time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.join()
        for file in folder.glob("*.pid"):
            if not gone(int(file.read_text())):
                os.kill(int(file.read_text()), signal.SIGKILL)


def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    with launcher(tmp_path, stuck) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert until(lambda: all(gone(pid) for pid in pids(tmp_path, 2)), 15)


@pytest.mark.alone  # one second of grace
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_cleanly_and_the_stuck_rank_by_force(
    tmp_path: Path, number: signal.Signals
) -> None:
    with launcher(tmp_path, stuck) as process:
        os.kill(process.pid, number)
        process.join(10)
        # Python ends by code 1 after KeyboardInterrupt in a child of multiprocessing.
        assert process.exitcode == (143 if number == signal.SIGTERM else 1)
        assert all(gone(pid) for pid in pids(tmp_path, 2))
        assert (tmp_path / "1.closed").exists(), "a waiting rank unwinds"
        assert not (tmp_path / "0.closed").exists()
        assert not os.listdir(tmp_path / "temp")


def test_a_second_interrupt_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    with launcher(tmp_path, stuck, grace=60) as process:
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert not gone(process.pid)
        os.kill(process.pid, signal.SIGINT)
        process.join(10)
        assert process.exitcode == 1 and all(gone(pid) for pid in pids(tmp_path, 2))


def leaves_child(session: Session, folder: Path) -> None:
    note(folder, session)
    if session.rank == 1:
        child = subprocess.Popen(["sleep", "100"])
        (folder / "2.pid").write_text(str(child.pid))


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    launch(leaves_child, 2, args=(tmp_path,), threads=1)
    assert until(lambda: all(gone(pid) for pid in pids(tmp_path, 3)), 5)


def test_a_taken_port_is_named_and_a_free_one_works_twice() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(UserError, match=rf"port: got {port}; .*write no port"):
            launch(total, 2, threads=1, port=port)
        assert time.monotonic() - started < 5
    with pytest.raises(RunError, match="rank 0 failed"):
        launch(leaves_early, 2, threads=1, port=port)
    assert launch(total, 2, threads=1, port=port) == [1.0, 1.0]


def test_two_jobs_at_once() -> None:
    def main() -> None:
        assert launch(total, 2, threads=1) == [1.0, 1.0]

    jobs = [multiprocessing.get_context("fork").Process(target=main) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(30)
    assert [job.exitcode for job in jobs] == [0, 0]


TORCHRUN = """
import os, sys, torch
from hyperparallel.runtime.comm.collectives import all_reduce_start, wait
from hyperparallel.runtime.job.session import open_session, ranks_from_environment
torch.set_num_threads(1)
with open_session(ranks_from_environment()) as session:
    x = wait(all_reduce_start(torch.ones(2), "sum", session.groups.world))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and session.rank == 1:
        sys.exit(3)
    wait(all_reduce_start(x, "sum", session.groups.world))
    open(os.path.join(sys.argv[1], f"done{session.rank}"), "w").close()
"""


def test_torchrun_gives_the_ranks_and_restarts_them(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    options = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.glob("done*"))) == 2


def test_the_environment_gives_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="MASTER_PORT"):
        ranks_from_environment()
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "29")
    misfits = (("RANK", "x"), ("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "-"))
    for name, wrong in misfits:
        with monkeypatch.context() as patch, pytest.raises(UserError, match=f"{name}: got {wrong!r}"):
            patch.setenv(name, wrong)
            ranks_from_environment()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    ranks = ranks_from_environment()
    assert ranks is not None and (ranks.rank, ranks.store) == (1, "h:29")
    assert ranks.prefix.endswith("/3") and not ranks.hosts_store


def test_more_ranks_than_cuda_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one device would only meet NCCL's own error, in their first collective."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert own_device(1) == torch.device("cuda", 1) and current == [torch.device("cuda", 1)]
    with pytest.raises(UserError, match=r"local rank 2 .* 2 CUDA devices'; allowed: at most 2; write CUDA"):
        own_device(2)


def test_ranks_are_not_forked_where_there_are_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looked for a device in this process has initialised a driver that no fork can use."""
    assert start_context(1).get_start_method() == "fork"
    assert start_context(2).get_start_method() == "forkserver"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert start_context(1).get_start_method() == "forkserver"


def test_a_job_over_gloo_alone_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever devices the machine has beside it."""

    def look(rank: int) -> tuple[str, str]:
        return job_device(), Here.in_job(Layout((2,), ("dp",))).device.type

    assert run_ranks(2, look) == [("cpu", "cpu")] * 2
    known = {"cpu:gloo,cuda:nccl": "cuda", "cuda:nccl": "cuda", "cpu:gloo,cuda:gloo": "cpu"}
    for backends, kind in known.items():
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        assert job_device() == kind


def test_ranks_ignore_the_terminal_and_lead_their_groups() -> None:
    def look(rank: int) -> tuple[bool, bool, int]:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        told = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(told))
        return ignored, os.getpgid(0) == os.getpid(), told.value

    assert run_ranks(2, look) == [(True, True, int(signal.SIGKILL))] * 2
