"""The pipe of a rank goes both ways: where it is, also inside a collective, and a request to stop."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperparallel.errors import RunError
from hyperparallel.runtime.comm.collectives import all_reduce_start, wait
from hyperparallel.runtime.comm.groups import Groups
from hyperparallel.runtime.job.channel import what_main_does
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session
from hyperparallel.train.stop import StopSign
from tests.runtime.job.test_launch import gone, note, pids, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(60)]


def summed(session: Session) -> None:
    wait(all_reduce_start(torch.ones(2), "sum", session.groups.world))


def lags(session: Session, how: str) -> None:
    for step in range(4):
        with session.step(step):
            if session.rank == 1 and step == 2:
                if how == "sleeps":
                    time.sleep(60)
                elif how == "meets":
                    Groups.of_default().ensure([(0, 1)], "nobody else")
                else:
                    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
            summed(session)


@pytest.mark.parametrize("transport", ["auto", "messages"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sleeps", r"rank 1 is in step 2, at .*test_channel.py:\d+ in lags"),
        ("computes", r"rank 1 is in step 2, at .*test_channel.py:\d+ in lags"),
    ],
)
def test_a_silent_rank_is_named_with_its_step_and_line(
    monkeypatch: pytest.MonkeyPatch, transport: str, how: str, words: str
) -> None:
    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", transport)
    with pytest.raises(RunError, match=words):
        launch(lags, 2, args=(how,), threads=1, timeout=4, grace=0.5)


@pytest.mark.parametrize("transport", ["auto", "messages"])
def test_a_rank_in_a_meeting_that_another_misses_in_a_collective_is_named(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Through shared memory the rank in the collective sees the deadlock; over gloo the launcher tells it."""
    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", transport)
    words = "deadlock: .*rank 1 waits for rank 0 to connect group 0-1 nobody else"
    if transport == "messages":
        words = "rank 1 is in step 2, waiting for ranks 0 to connect group 0-1 nobody else, at"
    began = time.monotonic()
    with pytest.raises(RunError, match=words):
        launch(lags, 2, args=("meets",), threads=1, timeout=4 if transport == "messages" else 50, grace=0.5)
    assert time.monotonic() - began < 20


def test_a_lost_peer_that_lives_is_asked_where_it_is() -> None:
    """Rank 0 fails at the deadline of its collective; the error says what rank 1 was doing instead."""
    with pytest.raises(RunError) as caught:
        launch(lags, 2, args=("sleeps",), threads=1, collective_timeout=timedelta(seconds=1), grace=0.5)
    text = str(caught.value)
    assert text.startswith("rank 0 failed in step 2:") and "rank 1 did not take part within 1 s" in text
    assert "rank 1 is in step 2, at " in text.splitlines()[1]


def test_a_rank_inside_a_collective_says_which_one() -> None:
    with pytest.raises(RunError, match=r"rank 0 is in step 2, waiting for .* of group world \(ranks "):
        launch(lags, 2, args=("sleeps",), threads=1, timeout=3, grace=0.5)


def test_what_the_main_thread_does_is_the_callers_line() -> None:
    assert what_main_does().endswith("in test_what_the_main_thread_does_is_the_callers_line")


def steps_until_asked(session: Session, folder: Path) -> None:
    note(folder, session)
    sign = StopSign(session.rank, session.world_size, asked=session.is_stopping)
    step = 0
    while not sign.before(step):
        summed(session)
        step += 1
    (folder / f"{session.rank}.step").write_text(str(step))


def never_looks(session: Session, folder: Path) -> None:
    note(folder, session)
    try:
        while True:
            summed(session)
    finally:
        (folder / f"{session.rank}.step").write_text("unwound")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("fn", [steps_until_asked, never_looks])
def test_ctrl_c_is_a_message_that_ranks_act_on_together(tmp_path: Path, fn: Any, number: int) -> None:
    def main() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        launch(fn, 2, args=(tmp_path,), threads=1, grace=20)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    ranks = pids(tmp_path, 2)
    time.sleep(0.3)
    began = time.monotonic()
    os.kill(process.pid or 0, number)
    process.join(15)
    assert time.monotonic() - began < 10 and until(lambda: all(map(gone, ranks)), 5)
    left = [(tmp_path / f"{rank}.step").read_text() for rank in range(2)]
    assert left == ["unwound"] * 2 if fn is never_looks else (left[0] == left[1] and int(left[0]) > 1)
