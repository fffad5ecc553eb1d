"""Session: this process as one rank of a job, with its process group initialised.

A job starts in one of two ways: `launch` forks local ranks and hands each a `Ranks`, or torchrun
sets the environment, which `ranks_from_environment` reads. Both end in `open_session`. Under
torchrun the store is prefixed with the restart count: the agent keeps one store over restarts, and
without a prefix a restarted gloo job reads the addresses of the dead one and never recovers (torch
2.13).

Leaves out starting and ending processes (`launch.py`, `worker.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hyperparallel.errors import UserError
from hyperparallel.runtime import host
from hyperparallel.runtime.comm.group import BACKENDS
from hyperparallel.runtime.comm.groups import DEFAULT_TIMEOUT, Groups
from hyperparallel.runtime.comm.settings import read_settings

# Private module, checked on torch 2.13: where the types of the stores are declared.
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore  # isort: skip


@dataclass(frozen=True)
class Ranks:
    """Which rank this process is, and where the ranks of the job meet.

    store: a file path (all ranks on this machine), or "host:port".
    hosts_store: this process serves the store at "host:port" itself.
    prefix: keeps the keys of this attempt apart from those of earlier ones.
    """

    rank: int
    world_size: int
    local_rank: int
    store: str
    hosts_store: bool = False
    prefix: str = "hyperparallel"


def ranks_from_environment() -> Ranks | None:
    """The ranks that torchrun gives through the environment, or None when it gives none.

    Raises `UserError` when only part of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is set, or makes no sense.
    """
    env = os.environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in env]
    if missing:
        given = {name: env[name] for name in needed if name in env}
        raise UserError("environment", given, "all of " + ", ".join(needed), "the whole set")
    world = _number(env, "WORLD_SIZE", 1, None)
    rank = _number(env, "RANK", 0, world)
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(
        rank,
        world,
        _number(env, "LOCAL_RANK", 0, world) if "LOCAL_RANK" in env else rank,
        f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        hosts_store=rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        prefix=f"hyperparallel/{attempt}",
    )


def _number(env: Mapping[str, str], name: str, least: int, below: int | None) -> int:
    """A whole number that the environment gives, from `least` up to and without `below`."""
    text = env[name]
    if text.isdecimal() and int(text) >= least and (below is None or int(text) < below):
        return int(text)
    end = "up" if below is None else f"to {below - 1}"
    raise UserError(name, text, f"a whole number from {least} {end}")


@dataclass
class Session:
    """One rank of a running job.

    groups: every communication group of this rank. device: where its tensors live.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    groups: Groups
    _on_step: Callable[[int], None] = field(default=lambda number: None, repr=False)
    _on_error: Callable[[BaseException], None] = field(default=lambda error: None, repr=False)
    _stop_asked: Callable[[], bool] = field(default=lambda: False, repr=False)

    def is_stopping(self) -> bool:
        """Whether the launcher asked this rank to stop (Ctrl-C, SIGTERM); never under torchrun.

        A function that looks here ends by itself, within the launcher's `grace`; one that never looks is
        ended by SystemExit where it stands. Ranks may hear of it one step apart (`train/stop.py`).
        """
        return self._stop_asked()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run one step under its number: a failure names it, and is reported as it leaves the step.

        The report goes out at once, so the job ends even if the exception is caught further out.
        """
        self._on_step(number)
        try:
            yield
        except Exception as error:
            self._on_error(error)
            raise


@contextmanager
def open_session(ranks: Ranks, *, timeout: timedelta = DEFAULT_TIMEOUT) -> Iterator[Session]:
    """Join the job as one rank: NCCL and gloo where CUDA is there, gloo otherwise.

    timeout: how long joining, or any one collective, may take before it is an error. On CPUs the process
    keeps its freed memory from then on (`host.keep_freed_memory`).
    """
    read_settings()  # a mistake there ends the job before it meets
    device = own_device(ranks.local_rank)
    if device.type == "cpu":
        host.keep_freed_memory()
    dist.init_process_group(
        BACKENDS[device.type],
        store=_meet(ranks, timeout),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
    # A quick rank must not leave, closing its connections, while a slow one still waits for the others'.
    dist.all_reduce(torch.zeros(1))
    try:
        groups = Groups.of_default(timeout)
        groups.ensure([range(ranks.world_size)])  # now, while all ranks are here for certain
        yield Session(ranks.rank, ranks.world_size, ranks.local_rank, device, groups)
        groups.close()  # not after an error: it waits for collectives under way, and a peer may be gone
    finally:
        dist.destroy_process_group()


def own_device(local_rank: int) -> torch.device:
    """The CUDA device of this rank, made the current one, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:  # NCCL refuses two ranks on one device
        given = f"local rank {local_rank} on a machine with {count} CUDA devices"
        raise UserError("ranks", given, f"at most {count}", "CUDA_VISIBLE_DEVICES= in front, to run on CPU")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _meet(ranks: Ranks, timeout: timedelta) -> Store:
    place, colon, port = ranks.store.rpartition(":")
    store: Store
    if colon and port.isdigit():
        store = TCPStore(
            place, int(port), ranks.world_size, ranks.hosts_store, timeout, wait_for_workers=False
        )
    else:
        store = FileStore(ranks.store, ranks.world_size)
        store.set_timeout(timeout)
    return PrefixStore(ranks.prefix, store)


def serve_store(port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Serve a store for `world_size` ranks on 127.0.0.1; raises `UserError` for a taken port."""
    server = host.listen_on_loopback(port)
    return TCPStore(
        "127.0.0.1",
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
