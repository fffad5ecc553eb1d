"""Which carrier moves a group's bytes: shared memory between ranks of one machine, else messages.

Connecting is collective over the members, and they all get the same kind: if one of them cannot use
shared memory (another machine, no compiler, no permission), none does, and the reason is logged
once. `HYPERPARALLEL_CARRIER=messages` turns shared memory off, `HYPERPARALLEL_DEBUG=collectives`
checks every call against the other members' first.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch

from hyperparallel.errors import UserError
from hyperparallel.runtime.collectives import Carrier
from hyperparallel.runtime.debug import CheckedCarrier
from hyperparallel.runtime.group import Group
from hyperparallel.runtime.messages import MessageCarrier
from hyperparallel.runtime.shm import ShmCarrier, open_shared

KINDS = ("auto", "messages")

_log = logging.getLogger(__name__)


def connect(group: Group, timeout: timedelta, kind: str = "auto") -> Carrier:
    """The carrier of a group that has a process group; all members must call this together.

    timeout: of any one collective. Raises `UserError` for an unknown kind.
    """
    if kind == "auto":
        kind = os.environ.get("HYPERPARALLEL_CARRIER") or "auto"
    if kind not in KINDS:
        raise UserError("HYPERPARALLEL_CARRIER", kind, " or ".join(KINDS))
    carrier: Carrier = MessageCarrier(group)
    if kind == "auto" and not torch.cuda.is_available():
        shared = open_shared(group)
        if isinstance(shared, str):
            level = logging.WARNING if group.index == 0 else logging.DEBUG
            _log.log(level, "group %s uses no shared memory: %s", group.name, shared)
        else:
            carrier = ShmCarrier(group, shared, carrier, timeout.total_seconds())
    if "collectives" in os.environ.get("HYPERPARALLEL_DEBUG", "").split(","):
        return CheckedCarrier(carrier, group, timeout)
    return carrier
