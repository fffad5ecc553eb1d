"""Groups: the registry that makes each group of a rank once, and connects it.

A group is made by its members only: ranks that are not in it do nothing and need not know of it. So one
job may hold several meshes, apart or overlapping. The members first meet in the job's store, where a
member that stays away is named at the deadline; then they make a process group and connect a transport.
Within one call groups are made in one order everywhere, so members of several groups cannot wait for one
another in a ring. Virtual ranks use the same registry without connections.

Leaves out which transport a group gets (`transport.py`) and how the job started (`session.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from hyperparallel.errors import UserError
from hyperparallel.runtime.comm.group import BACKENDS, Group, job_device, job_timeout
from hyperparallel.runtime.comm.meeting import meet_members
from hyperparallel.runtime.comm.transport import connect

# Private names, checked on torch 2.13: what new_group is made of.
from torch.distributed.distributed_c10d import (  # isort: skip
    GroupName,
    _get_default_store,
    _new_process_group_helper,
    _world,
)

__all__ = ["DEFAULT_TIMEOUT", "Group", "Groups", "new_process_group"]

DEFAULT_TIMEOUT = timedelta(minutes=10)

GroupKey = tuple[tuple[int, ...], str]
"""The ranks of a group in their order, and its channel."""


class Groups:
    """Every group of one rank, made once each; `get` is local, `ensure` is collective over members.

    A channel keeps groups of the same ranks apart, so that what goes through one never waits for what
    goes through the other.

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
        """`connected` tells real ranks from virtual ones.

        transport: "auto" takes shared memory where it works, "messages" only the process group.
        """
        self.rank, self.world_size = rank, world_size
        self.timeout, self.transport = timeout, transport
        self._connected = connected and world_size > 1
        self._made: dict[GroupKey, Group] = {}

    @classmethod
    def of_default(cls, timeout: timedelta | None = None, transport: str = "auto") -> Groups:
        """The registry in the default process group, with no group in it yet; timeout: None takes its."""
        patience = job_timeout(DEFAULT_TIMEOUT) if timeout is None else timeout
        return cls(
            dist.get_rank(), dist.get_world_size(), connected=True, timeout=patience, transport=transport
        )

    @property
    def world(self) -> Group:
        """The group of all ranks of the job; the first use is collective over them."""
        everyone = tuple(range(self.world_size))
        self.ensure([everyone])
        return self._made[everyone, ""]

    def get(self, ranks: Sequence[int], channel: str = "") -> Group:
        """The group of these ranks in this order; several ranks must have been `ensure`d before."""
        key = tuple(ranks), channel
        if key not in self._made:
            if len(key[0]) > 1 and self._connected:
                known = ", ".join(group.name for group in self._made.values())
                raise UserError("ranks", key[0], f"a group that Groups.ensure made: {known}")
            self._make(key)
        return self._made[key]

    def ensure(self, wanted: Iterable[Sequence[int]], channel: str = "") -> None:
        """Make those of the wanted groups that this rank is in; their members must all call this.

        Members call in the same order; within a call the order does not matter. Raises `UserError` for
        ranks outside the job, `PeerLost` that names the members that did not call in time.
        """
        # Sorted, as on every other member: two that made common groups in other orders would deadlock.
        keys = sorted({(tuple(ranks), channel) for ranks in wanted})
        for ranks, _ in keys:
            if any(rank >= self.world_size for rank in ranks):
                raise UserError("ranks", ranks, f"ranks below {self.world_size}")
        for key in keys:
            if key not in self._made:
                self._make(key)

    def process_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The torch process group of a connected group, made for one rank alone when it is asked for."""
        group = self.get(ranks)
        if group.handle is None:
            if group.size > 1 or group.index < 0:
                raise group.refuse("process_group")
            group.handle = new_process_group(ranks, self.timeout)
        return group.handle

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

    def _make(self, key: GroupKey) -> None:
        ranks = key[0]
        group = Group(ranks, self.rank, None, self._name(key))
        if self._connected and group.size > 1 and group.index >= 0:
            seconds = self.timeout.total_seconds()
            why = f"connect group {group.name}"
            # torch's own joining of a group waits too, but does not say for whom.
            meet_members(f"group/{group.name}", self.rank, ranks, "", seconds, why)
            # The default process group is there already; another one would double its connections.
            is_world = group.name == "world"
            group.handle = dist.group.WORLD if is_world else new_process_group(ranks, self.timeout)
            group.transport = connect(group, self.timeout, self.transport)
        self._made[key] = group

    def _name(self, key: GroupKey) -> str:
        ranks, channel = key
        if not channel and ranks == tuple(range(self.world_size)):
            return "world"
        return "-".join(map(str, ranks)) + (f" {channel}" if channel else "")


def new_process_group(ranks: Sequence[int], timeout: timedelta = DEFAULT_TIMEOUT) -> dist.ProcessGroup:
    """A process group of these ranks in this order; only they call this, equally often.

    What `torch.distributed.new_group` does, under a name that the members agree on: with local
    synchronisation torch puts the number of all groups of the process in the name, which differs between
    ranks that are in different numbers of groups, and they deadlock (torch 2.13).
    """
    rank, store = dist.get_rank(), _get_default_store()
    label = "-".join(map(str, ranks))
    name = f"hyperparallel {label} #{store.add(f'process_group/{label}/{rank}', 1)}"
    backend = BACKENDS["cuda"] if job_device() == "cuda" else dist.get_backend()  # gloo, or a fake one
    made: dist.ProcessGroup
    made, _ = _new_process_group_helper(
        len(ranks), ranks.index(rank), list(ranks), backend, store, GroupName(name), timeout=timeout
    )
    # Where torch's own functions look up the ranks of a group (object collectives, DeviceMesh).
    _world.pg_group_ranks[made] = {each: place for place, each in enumerate(ranks)}
    return made
