"""Launch: start local ranks, watch them, and end all of them as soon as one fails.

Ranks are forked from this process where that is safe (0.1 s for 4 ranks; spawning takes 8-13 s),
else from a fork server that has imported torch; then `fn` and its arguments are pickled. Fork is unsafe
where ranks use CUDA, whose driver whatever has asked for a device has initialised here, and for ranks with
several threads: libgomp's pool does not survive a fork and the first parallel loop would hang.

The launcher waits on every rank's pipe and exit at once. The first failure ends the job; among
failures that arrive together, one that merely saw a peer go away is not the first. Ranks that are
silent when others failed or the time is up are asked where they are, and the error says it. Every
rank ends by SIGTERM, after `grace` seconds by SIGKILL, with the process group it leads. On Ctrl-C or
SIGTERM ranks are asked to stop, and killed after `grace` seconds; a second Ctrl-C kills at once.

Leaves out the child's side (`worker.py`) and ranks started by torchrun (`session.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from typing import Any

import torch

from hyperparallel.errors import RunError, UserError
from hyperparallel.runtime import host
from hyperparallel.runtime.comm.groups import DEFAULT_TIMEOUT
from hyperparallel.runtime.comm.settings import read_settings
from hyperparallel.runtime.job.channel import Failure, RankRequest, Where
from hyperparallel.runtime.job.session import Ranks, serve_store
from hyperparallel.runtime.job.worker import LaunchJob, work

SETTLE_SECONDS = 1.0
"""How long the rank that went away may take to be noticed after its peers have complained."""

ANSWER_SECONDS = 1.0
"""How long a rank may take to say where it is; one whose main thread holds the interpreter cannot."""


def launch(
    fn: Callable[..., Any],
    num_ranks: int,
    *,
    args: Sequence[Any] = (),
    timeout: float | None = None,
    collective_timeout: timedelta = DEFAULT_TIMEOUT,
    port: int | None = None,
    threads: int | None = None,
    grace: float = 3.0,
) -> list[Any]:
    """Run `fn(session, *args)` on `num_ranks` local ranks; return their results in rank order.

    timeout: seconds for the whole run, none by default. collective_timeout: for any one collective.
    port: where the ranks meet on 127.0.0.1; by default they meet in a private file. threads: per
    rank, by default the cores shared out, at least 1. grace: seconds between asking a rank to end (also
    by Ctrl-C, see `Session.is_stopping`) and SIGKILL.

    Raises `RunError` with the traceback of the rank that failed first, `UserError` for a taken port
    or no ranks; KeyboardInterrupt or SystemExit after Ctrl-C or SIGTERM. No rank outlives the call.

    >>> launch(lambda session, base: base + session.rank, 2, args=(10,), threads=1)
    [10, 11]
    """
    if type(num_ranks) is not int or num_ranks < 1:
        raise UserError("num_ranks", num_ranks, "at least 1")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise UserError("threads", threads, "at least 1, or None: the cores shared out")
    if not isinstance(collective_timeout, timedelta):
        raise UserError("collective_timeout", collective_timeout, "a datetime.timedelta")
    read_settings()
    threads = threads or max(1, host.usable_cores() // num_ranks)
    with _meeting_place(num_ranks, port, collective_timeout) as store, _stop_signals() as stops:
        crew = _Crew(start_context(threads), num_ranks, grace, stops)
        job = LaunchJob(os.getpid(), threads, collective_timeout, crew.steps)
        try:
            for rank in range(num_ranks):
                crew.start(fn, tuple(args), Ranks(rank, num_ranks, rank, store), job)
            return crew.watch(None if timeout is None else time.monotonic() + timeout)
        finally:
            crew.end()


class _Crew:
    """The processes of one launch."""

    def __init__(self, context: Any, num_ranks: int, grace: float, stops: list[int]) -> None:
        self._context, self._grace, self._stops = context, grace, stops
        # No lock: each rank writes its own number, and a killed rank would take a lock along.
        self.steps = context.RawArray("q", [-1] * num_ranks)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._results: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._answers: dict[int, Where] = {}

    def start(self, fn: Callable[..., Any], args: tuple[Any, ...], ranks: Ranks, job: LaunchJob) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=work, args=(fn, args, ranks, job, theirs), name=f"rank-{ranks.rank}"
        )
        with warnings.catch_warnings():  # forking beside threads that hold no lock is fine here
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()  # or later ranks inherit it and a dead rank's pipe never ends
        self._processes.append(process)
        self._pipes.append(ours)

    def watch(self, deadline: float | None) -> list[Any]:
        """Wait for all results, or raise what ended the run."""
        num_ranks = len(self._processes)
        while len(self._results) < num_ranks and not self._failures:
            self._gather(0.2)
            self._check_stops()
            if deadline is not None and time.monotonic() > deadline and not self._failures:
                late = [r for r in range(num_ranks) if r not in self._results]
                raise RunError("\n".join(["timeout: the run did not finish in time", *self._where(late)]))
        if self._failures:
            # The rank that went away is the cause, but those that miss it may be heard first.
            settled = time.monotonic() + SETTLE_SECONDS
            while all(f.lost for f in self._failures) and time.monotonic() < settled:
                self._gather(0.05)
            heard = {*self._results, *(f.rank for f in self._failures)}
            silent = [r for r in range(num_ranks) if r not in heard]
            lost = all(f.lost for f in self._failures)
            raise _error(self._failures, self._where(silent) if lost else [])
        return [self._results[rank] for rank in range(num_ranks)]

    def end(self) -> None:
        """End every rank that still runs, with its children, and wait until all are gone."""
        running = [p for p in self._processes if p.is_alive()]
        if len(self._results) == len(self._processes):  # let them close their sessions
            self._wait_for(running)
            running = [p for p in running if p.is_alive()]
        if self._stops:
            for rank in range(len(self._processes)):
                # Asked, not signalled: SIGTERM would end, in the midst of a step, what stops by itself.
                self._ask(rank, RankRequest.STOP)
        else:
            for process in running:
                host.signal_group(process.pid, signal.SIGTERM)
        self._wait_for(running)
        for process in self._processes:
            # Those that ended too: a process that such a rank started may still run.
            host.signal_group(process.pid, signal.SIGKILL, has_ended=not process.is_alive())
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _ask(self, rank: int, request: RankRequest) -> None:
        with suppress(OSError):  # it is gone, or about to be
            self._pipes[rank].send_bytes(pickle.dumps(request))

    def _where(self, ranks: list[int]) -> list[str]:
        """Where ranks are that have said nothing, a line each."""
        for rank in ranks:
            self._ask(rank, RankRequest.WHERE)
        limit = time.monotonic() + ANSWER_SECONDS
        while any(r not in self._answers for r in ranks) and time.monotonic() < limit:
            self._gather(0.05)
        return [
            str(self._answers[rank])
            if rank in self._answers
            else f"rank {rank} is in step {self.steps[rank]} (-1: none) and does not say where"
            for rank in ranks
        ]

    def _wait_for(self, processes: list[Any]) -> None:
        limit = time.monotonic() + self._grace
        while any(p.is_alive() for p in processes) and time.monotonic() < limit:
            if self._stops.count(signal.SIGINT) > 1:
                return
            wait_any([p.sentinel for p in processes if p.is_alive()], 0.1)

    def _gather(self, seconds: float) -> None:
        """Take in reports and deaths for up to `seconds`."""
        open_ranks = [
            rank
            for rank in range(len(self._processes))
            if rank not in self._results and all(f.rank != rank for f in self._failures)
        ]
        watched: dict[Any, int] = {}
        for rank in open_ranks:
            watched[self._processes[rank].sentinel] = watched[self._pipes[rank]] = rank
        # Once each, also where a rank's report and its end are both there.
        for rank in dict.fromkeys(watched[ready] for ready in wait_any([*watched], seconds)):
            if not self._receive(rank) and not self._processes[rank].is_alive():
                self._failures.append(self._death(rank))

    def _receive(self, rank: int) -> bool:
        with suppress(EOFError, OSError):
            if self._pipes[rank].poll():
                report = pickle.loads(self._pipes[rank].recv_bytes())
                if isinstance(report, Failure):
                    self._failures.append(report)
                elif isinstance(report, Where):
                    self._answers[report.rank] = report
                else:
                    self._results[rank] = report[0]
                return True
        # An ended pipe: the process is about to be gone.
        self._processes[rank].join(0.2)
        return False

    def _death(self, rank: int) -> Failure:
        code = self._processes[rank].exitcode
        how = f"exited with code {code} before it had a result"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return Failure(rank, self.steps[rank], how, "", lost=False)

    def _check_stops(self) -> None:
        if signal.SIGINT in self._stops:
            raise KeyboardInterrupt
        if self._stops:
            raise SystemExit(128 + self._stops[0])


def _error(failures: list[Failure], silent: Sequence[str] = ()) -> RunError:
    """One error for the run: the first rank's own traceback, the others in one line each.

    silent: where ranks are that did not fail, for failures that only miss somebody.
    """
    first = min(failures, key=lambda f: f.lost)  # stable: the earliest of its kind
    where = f" in step {first.step}" if first.step >= 0 else ""
    lines = [f"rank {first.rank} failed{where}: {first.summary}", *silent]
    if first.trace:
        lines += ["", f"Traceback of rank {first.rank}:", first.trace.rstrip()]
    for other in failures:
        if other is not first:
            lines.append(f"then rank {other.rank}: {other.summary.splitlines()[0][:200]}")
    return RunError("\n".join(lines))


def start_context(threads: int) -> Any:
    """How ranks of so many threads are started: forked, or from a fork server."""
    # Counted by NVML; `is_available` would initialise CUDA's driver here, and no forked rank could use it.
    if threads == 1 and torch.cuda.device_count() == 0:
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    return context


@contextmanager
def _meeting_place(num_ranks: int, port: int | None, timeout: timedelta) -> Iterator[str]:
    """Where the ranks meet: a file in a private folder, or a store that this process serves."""
    if port is None:
        folder = tempfile.mkdtemp(prefix="hyperparallel-")
        try:
            yield os.path.join(folder, "store")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    served = serve_store(port, num_ranks, timeout)
    yield f"127.0.0.1:{served.port}"
    del served  # not before the ranks are gone


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them (in the main thread only)."""
    stops: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: stops.append(number)) for n in numbers}
    try:
        yield stops
    finally:
        # Only now: a signal between two ranks' ends must not leave the others running.
        for number, handler in before.items():
            signal.signal(number, handler)
