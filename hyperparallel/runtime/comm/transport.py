"""Which transport moves a group's bytes: shared memory between ranks of one machine, else messages.

Connecting is collective over the members, and they all get the same kind: if one of them cannot use
shared memory (another machine, no compiler, no permission), none does, and the reason is logged
once. `HYPERPARALLEL_TRANSPORT=messages` turns shared memory off, `HYPERPARALLEL_DEBUG=collectives`
checks every call against the other members' first.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import cast

import torch

from hyperparallel.errors import UserError
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.collectives import Transport
from hyperparallel.runtime.comm.debug import CheckedTransport
from hyperparallel.runtime.comm.group import Group, job_device
from hyperparallel.runtime.comm.process_group import ProcessGroupTransport
from hyperparallel.runtime.comm.settings import VARIABLES, read_settings
from hyperparallel.runtime.comm.shm import SharedMemoryTransport, open_shared

_log = logging.getLogger(__name__)


def connect(group: Group, timeout: timedelta, kind: str = "auto") -> Transport:
    """The transport of a group that has a process group; all members must call this together.

    timeout: of any one collective. Raises `UserError` for an unknown kind.
    """
    settings = read_settings()
    if kind == "auto":
        kind = settings.get("HYPERPARALLEL_TRANSPORT", "auto")
    if kind not in VARIABLES["HYPERPARALLEL_TRANSPORT"]:
        raise UserError("transport", kind, " or ".join(VARIABLES["HYPERPARALLEL_TRANSPORT"]))
    transport: Transport = ProcessGroupTransport(group)
    if job_device() == "cuda":
        # NCCL connects in the first collective, which may be a permute that a member has no part in.
        collectives.wait(transport.all_reduce(torch.zeros(1, device="cuda"), "sum"))
    elif kind == "auto":
        # On all members or on none: they answer alike, also where one of them could not.
        shared = open_shared(group)
        if isinstance(shared, str):
            level = logging.WARNING if group.index == 0 else logging.DEBUG
            _log.log(level, "group %s uses no shared memory: %s", group.name, shared)
        else:
            transport = SharedMemoryTransport(group, shared, transport, timeout.total_seconds())
    if "HYPERPARALLEL_DEBUG" in settings:
        return cast(Transport, CheckedTransport(transport, group, timeout))
    return transport
