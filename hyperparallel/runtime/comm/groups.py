"""Groups: the registry that makes each group of a rank once, and connects it.

Making a process group takes every rank of the job, in the same order, and connecting a transport
takes every member. So the registry is told the wanted groups in one collective call,
`Groups.ensure`, and makes the union in one order everywhere. Virtual ranks use the same registry
without connections.

Leaves out which transport a group gets (`transport.py`) and how the job started (`session.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from hyperparallel.errors import UserError
from hyperparallel.runtime.comm.group import BACKENDS, Group, job_device
from hyperparallel.runtime.comm.transport import connect

__all__ = ["DEFAULT_TIMEOUT", "Group", "Groups"]

DEFAULT_TIMEOUT = timedelta(minutes=10)


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
        transport: str = "auto",
    ) -> None:
        """`connected` tells real ranks from virtual ones; then all ranks must call this together.

        transport: "auto" takes shared memory where it works, "messages" only the process group.
        """
        self.rank, self.world_size = rank, world_size
        self.timeout, self.transport = timeout, transport
        self._connected = connected and world_size > 1
        self._made: dict[tuple[int, ...], Group] = {}
        self._make(tuple(range(world_size)), "world")

    @classmethod
    def of_default(cls, timeout: timedelta = DEFAULT_TIMEOUT, transport: str = "auto") -> Groups:
        """The registry in the default process group; all ranks must call this together."""
        return cls(
            dist.get_rank(), dist.get_world_size(), connected=True, timeout=timeout, transport=transport
        )

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
            self._make(key)
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
        if self._connected:
            asked: list[list[tuple[int, ...]]] = [[] for _ in range(self.world_size)]
            dist.all_gather_object(asked, keys)
            keys = sorted({key for part in asked for key in part})
        for key in keys:
            if key not in self._made:
                self._make(key)

    def all(self) -> tuple[Group, ...]:
        """Every group made so far, in the order of making."""
        return tuple(self._made.values())

    def close(self) -> None:
        """Let go of the process groups and transports; no collective can be made afterwards.

        A process group's threads end with the last reference to it. One that is still letting go of a
        tensor when Python finalises aborts the process (torch 2.13: it wants the interpreter's lock).
        """
        for group in self._made.values():
            group.transport = group.handle = None

    def _make(self, ranks: tuple[int, ...], name: str = "") -> None:
        group = Group(ranks, self.rank, None, name)
        if self._connected and group.size > 1:
            made = dist.group.WORLD
            if name != "world":
                backend = BACKENDS[job_device()]
                made = dist.new_group(
                    list(ranks), timeout=self.timeout, backend=backend, sort_ranks=False
                )
            if group.index >= 0:
                group.handle = made
                group.transport = connect(group, self.timeout, self.transport)
        self._made[ranks] = group
