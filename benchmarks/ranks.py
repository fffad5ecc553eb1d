"""Local ranks for a benchmark: fork, join a gloo group, run one function, bring back its result.

Every rank computes with one thread, so that as many ranks as cores do not fight. The first rank
that raises ends the others, and its traceback is what the caller sees. Freed memory stays with the
process, as in ranks that the library launches: here for every program alike. No restarts, no remote
machines: what the library itself offers for that is not what these benchmarks measure.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hyperparallel.runtime.host import keep_freed_memory

Result = TypeVar("Result")


class RankError(RuntimeError):
    """A rank raised, died or took too long."""


def run_ranks(
    num_ranks: int, function: Callable[..., Result], *args: Any, timeout_seconds: float = 600.0
) -> list[Result]:
    """`function(*args)` on every rank of a gloo group; the results by rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store_path = str(Path(folder) / "store")
        workers, pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            target_args = (rank, num_ranks, store_path, theirs, function, args)
            worker = context.Process(target=rank_main, args=target_args)
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        try:
            return collect(pipes, timeout_seconds)
        finally:
            for worker in workers:
                worker.join(timeout=5)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def collect(pipes: list[Connection], timeout_seconds: float) -> list[Any]:
    """Read one answer per rank, whichever comes first."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"no answer from {len(waiting)} ranks in {timeout_seconds:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, value = pipes[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} ended without an answer") from None
            if not good:
                raise RankError(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def rank_main(
    rank: int,
    num_ranks: int,
    store_path: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store_path, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=120),
        )
        pipe.send((True, function(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
