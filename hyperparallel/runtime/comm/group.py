"""Group: ordered ranks that communicate, as a collective node of a rank's program carries it.

A group knows the ranks, which of them this process is, and how it reaches the others: a torch
process group and the transport on top of it. Virtual ranks have groups with neither.

Leaves out how groups are made and connected (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyperparallel.errors import RunError, UserError

Bind = Callable[[tuple[str, ...]], Any]
"""From mesh axes to this rank's group along them: a `Group`, or what stands for one on virtual ranks."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By the device of a rank's tensors, what its process groups are made of."""


def job_device() -> str:
    """"cuda" where the job's tensors are on CUDA devices: its default process group has NCCL; else "cpu".

    Not what the machine has: a job over gloo alone runs on CPU beside any number of devices.
    """
    return "cuda" if "cuda:nccl" in dist.get_backend_config() else "cpu"


def job_timeout(otherwise: timedelta) -> timedelta:
    """How long a collective of the job may take: what its default process group was told.

    `otherwise` where that does not say (fake process groups).
    """
    assert dist.group.WORLD is not None, "no default process group"
    backend = dist.group.WORLD._get_backend(torch.device(job_device()))
    # Private name, checked on torch 2.13; nothing public tells it.
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return otherwise if found is None else found


class PeerLost(RunError):
    """A collective that failed because another rank went away; the cause is that rank's failure."""


class Group:
    """Ordered ranks, the index of this process among them, and the ways to reach the others.

    index: position of this rank in `ranks`, -1 when it is not a member (then no collective may use
    it). handle: the torch process group. transport: what moves the bytes (`collectives.Transport`).
    Both are None for one rank, for virtual ranks and for non-members.

    >>> Group((0, 2), rank=2)
    Group((0, 2), rank=2)
    >>> Group((0, 2), rank=2).index
    1
    """

    __slots__ = ("handle", "index", "name", "rank", "ranks", "size", "transport")

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        handle: dist.ProcessGroup | None = None,
        name: str = "",
    ) -> None:
        self.ranks = tuple(ranks)
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise UserError("ranks", ranks, "one or more different ranks, each at least 0")
        self.rank = rank
        self.index = self.ranks.index(rank) if rank in self.ranks else -1
        self.size = len(self.ranks)
        self.handle = handle
        self.transport: Any = None
        self.name = name or "-".join(map(str, self.ranks))

    def __repr__(self) -> str:
        return f"Group({self.ranks}, rank={self.rank})"

    def refuse(self, op: str) -> RunError:
        """The error of a call that this process cannot make in this group."""
        where = f"{op} on rank {self.rank}: group {self.name} = ranks {self.ranks}"
        if self.index < 0:
            return RunError(f"{where} does not contain this rank")
        return RunError(f"{where} is not connected; make it with Groups.ensure on every member")
