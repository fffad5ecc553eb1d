"""One launched rank, from its first line to its exit: the child's side of `launch.py`.

It leads its own process group, dies with its launcher, ignores Ctrl-C (the launcher decides), ends
by SystemExit on SIGTERM, and reports through a pipe: the result, or each failure as soon as it is
known, with the traceback as text. A failure that only tells that a peer went away is marked `lost`;
the launcher then looks for the peer's own.

The other way a thread listens to the launcher (`channel.py`): it says where the main thread is, also
while that waits in a collective, and passes on a request to stop: to a function that looks at
`Session.is_stopping` as an answer there, to any other as a SystemExit.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from hyperparallel.runtime import host
from hyperparallel.runtime.comm.group import PeerLost
from hyperparallel.runtime.job.channel import Failure, RankRequest, Where, what_main_does
from hyperparallel.runtime.job.session import Ranks, open_session

_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out waiting",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LaunchJob:
    """What every rank of a launch is told. `steps` is shared memory, one number a rank."""

    launcher: int
    threads: int
    timeout: timedelta
    steps: Any


class Reporter:
    """Sends failures as they happen, answers while it goes on, then at most one result."""

    def __init__(self, pipe: Connection, rank: int, steps: Any) -> None:
        self._pipe, self._rank, self._steps = pipe, rank, steps
        self._lock = threading.Lock()
        self._failed = False

    def step(self, number: int) -> None:
        self._steps[self._rank] = number

    def failure(self, error: BaseException) -> None:
        """Report the first failure of this rank; later ones follow from it."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
            text = "".join(traceback.format_exception(error))
            summary = "".join(traceback.format_exception_only(error)).strip()
            lost = isinstance(error, PeerLost) or (
                isinstance(error, (RuntimeError, OSError)) and bool(_LOST.search(str(error)))
            )
            step = self._steps[self._rank]
            self._pipe.send_bytes(pickle.dumps(Failure(self._rank, step, summary, text, lost)))

    def where(self) -> None:
        """Tell the launcher where this rank is."""
        answer = Where(self._rank, self._steps[self._rank], what_main_does())
        with self._lock:
            self._pipe.send_bytes(pickle.dumps(answer))

    def result(self, value: object) -> None:
        # Plain pickle: the tensors of multiprocessing's own pickler die with this process.
        data = pickle.dumps((value,))
        with self._lock:
            if not self._failed:
                self._pipe.send_bytes(data)


class _StopRequest:
    """Whether the launcher asked this rank to stop, for a function that looks, or for one that does not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = self._is_watched = False

    def look(self) -> bool:
        """Whether to stop; from the first look on nothing else ends the rank."""
        with self._lock:
            self._is_watched = True
            return self._asked

    def ask(self) -> None:
        """Stop the function that runs in the main thread."""
        with self._lock:
            self._asked = True
            if not self._is_watched:
                # To that thread and no other, so that a wait inside a collective ends too.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _listen(pipe: Connection, reporter: Reporter, stop: _StopRequest) -> None:
    """Do what the launcher asks, until it is gone."""
    with suppress(EOFError, OSError):
        while True:
            match pickle.loads(pipe.recv_bytes()):
                case RankRequest.WHERE:
                    reporter.where()
                case RankRequest.STOP:
                    stop.ask()


def work(
    fn: Callable[..., object], args: tuple[Any, ...], ranks: Ranks, job: LaunchJob, pipe: Connection
) -> None:
    """Run `fn(session, *args)` as one rank and report; the target of a launched process."""
    # Before anything is started: what this rank starts is ended with its group.
    host.lead_process_group()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    host.die_with(os.getppid(), job.launcher)
    # For what this rank starts; torch has read it and is told below.
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    # Else gloo takes the address of the host's name, which need not lead anywhere (VPN, container).
    os.environ["GLOO_SOCKET_IFNAME"] = host.LOOPBACK
    torch.set_num_threads(job.threads)
    _forget_compile_threads()
    reporter, stop = Reporter(pipe, ranks.rank, job.steps), _StopRequest()
    threading.Thread(target=_listen, args=(pipe, reporter, stop), daemon=True, name="launcher").start()
    try:
        with open_session(ranks, timeout=job.timeout) as session:
            session._on_step, session._on_error = reporter.step, reporter.failure
            session._stop_asked = stop.look
            try:
                value = fn(session, *args)
            except Exception as error:
                reporter.failure(error)  # before the session closes, which may wait for peers
                raise
        reporter.result(value)
    except Exception as error:
        reporter.failure(error)
        # The launcher has the traceback; printing it too would say everything twice.
        raise SystemExit(1) from None


def _forget_compile_threads() -> None:
    """A fork copies Inductor's pool of threads but not the threads: what is given to it never runs.

    Torch 2.13 forgets its pool of processes in a forked child, not this one.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is not None:
        module.AsyncCompile.pool.cache_clear()


def _leave(number: int, frame: object) -> None:  # noqa: ARG001 -- a signal handler
    raise SystemExit(128 + number)
