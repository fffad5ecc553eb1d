"""Groups: ordered ranks that communicate, and the registry that makes each of them once.

A `Group` is what a collective node of a rank's program carries: the ordered ranks, which of them
this process is, and how it reaches the others (a torch process group, and perhaps a shared-memory
carrier). Virtual ranks have groups without either. Making a process group needs every rank of the
job in the same order, so the registry takes the wanted groups in one collective call,
`Groups.ensure`.

Leaves out which carrier moves the bytes (`collectives.py`) and how the job started (`session.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyperparallel.errors import RunError, UserError

DEFAULT_TIMEOUT = timedelta(minutes=10)


class PeerLost(RunError):
    """A collective that failed because another rank went away; the cause is that rank's failure."""


class Group:
    """Ordered ranks, the index of this process among them, and the ways to reach the others.

    index: position of this rank in `ranks`, -1 when it is not a member (then no collective may use
    it). handle: the torch process group; None for one rank, for virtual ranks and for non-members.
    carrier: shared-memory transport between ranks of one machine (`shm.py`), or None.

    >>> Group((0, 2), rank=2)
    Group((0, 2), rank=2)
    >>> Group((0, 2), rank=2).index
    1
    """

    __slots__ = ("carrier", "handle", "index", "name", "rank", "ranks", "size")

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
        self.carrier: Any = None
        self.name = name or "-".join(map(str, self.ranks))

    def __repr__(self) -> str:
        return f"Group({self.ranks}, rank={self.rank})"

    def refuse(self, op: str) -> RunError:
        """The error of a call that this process cannot make in this group."""
        where = f"{op} on rank {self.rank}: group {self.name} = ranks {self.ranks}"
        if self.index < 0:
            return RunError(f"{where} does not contain this rank")
        return RunError(f"{where} has no process group; make it with Groups.ensure on every rank")


class Groups:
    """Every group of one rank, made once each; `get` is local, `ensure` is collective.

    >>> groups = Groups(rank=1, world_size=4)
    >>> groups.ensure([(0, 1), (2, 3), (1,)])
    >>> groups.get((0, 1)).index, groups.get((2, 3)).index
    (1, -1)
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        connected: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        """`connected` tells real ranks (a default process group exists) from virtual ones."""
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._connected = connected and world_size > 1
        self._made: dict[tuple[int, ...], Group] = {}
        world = tuple(range(world_size))
        handle = dist.group.WORLD if self._connected else None
        self._made[world] = Group(world, rank, handle, "world")

    @classmethod
    def of_default(cls, timeout: timedelta = DEFAULT_TIMEOUT) -> Groups:
        """The registry of this process in the default process group, which must exist."""
        return cls(dist.get_rank(), dist.get_world_size(), connected=True, timeout=timeout)

    @property
    def world(self) -> Group:
        return self._made[tuple(range(self.world_size))]

    def get(self, ranks: Sequence[int]) -> Group:
        """The group of these ranks in this order; several ranks must have been `ensure`d before."""
        key = tuple(ranks)
        if key not in self._made:
            if len(key) > 1 and self._connected:
                known = ", ".join(str(k) for k in self._made)
                raise UserError("ranks", key, f"a group that Groups.ensure made: {known}")
            self._made[key] = Group(key, self.rank)
        return self._made[key]

    def ensure(self, wanted: Iterable[Sequence[int]]) -> None:
        """Make every group that any rank wants; all ranks of the job must call this together.

        Ranks may ask for different groups: the union is made, in the same order everywhere. Raises
        `UserError` for ranks outside the job.
        """
        keys = sorted({tuple(ranks) for ranks in wanted})
        for key in keys:
            if any(rank >= self.world_size for rank in key):
                raise UserError("ranks", key, f"ranks below {self.world_size}")
        if not self._connected:
            for key in keys:
                self.get(key)
            return
        asked: list[list[tuple[int, ...]]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(asked, keys)
        for key in sorted({key for part in asked for key in part}):
            if key not in self._made:
                handle = self._connect(key) if len(key) > 1 else None
                self._made[key] = Group(key, self.rank, handle)

    def all(self) -> tuple[Group, ...]:
        """Every group made so far, in the order of making."""
        return tuple(self._made.values())

    def _connect(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        made = dist.new_group(list(ranks), timeout=self.timeout, backend=backend, sort_ranks=False)
        return made if self.rank in ranks else None
