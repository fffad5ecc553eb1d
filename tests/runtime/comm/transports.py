"""The ways in which a group's bytes can go: what tests of collectives run over."""

from __future__ import annotations

from hyperparallel.runtime.comm import process_group
from hyperparallel.runtime.comm.groups import Groups

TRANSPORTS = ("messages", "direct", "auto")
"""The process group as it is, with every message direct, and shared memory."""

_DIRECT_BYTES = process_group.DIRECT_BYTES


def groups_over(transport: str) -> Groups:
    """The groups of this rank; all ranks call this together."""
    process_group.DIRECT_BYTES = 1 if transport == "direct" else _DIRECT_BYTES
    return Groups.of_default(transport="messages" if transport == "direct" else transport)
