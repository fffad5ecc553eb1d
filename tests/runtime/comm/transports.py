"""The ways in which a group's bytes can go: what tests of collectives run over."""

from __future__ import annotations

from hyperparallel.runtime.comm import process_group
from hyperparallel.runtime.comm.groups import Groups

TRANSPORTS = ("messages", "rings", "direct", "auto")
"""The process group as it is, with its own all-reduce for every size, with every message direct, and shared
memory."""

_DIRECT_BYTES, _ONE_ROUND_BYTES = process_group.DIRECT_BYTES, process_group.ONE_ROUND_BYTES


def groups_over(transport: str) -> Groups:
    """The groups of this rank; all ranks call this together."""
    process_group.DIRECT_BYTES = 1 if transport == "direct" else _DIRECT_BYTES
    process_group.ONE_ROUND_BYTES = 0 if transport == "rings" else _ONE_ROUND_BYTES
    return Groups.of_default(transport="auto" if transport == "auto" else "messages")
