"""Which carrier moves a group's bytes."""

from __future__ import annotations

from collections.abc import Iterable

from hyperparallel.runtime.groups import Group
from hyperparallel.runtime.messages import MessageCarrier


def attach(groups: Iterable[Group]) -> None:
    """Give every connected group a carrier."""
    for group in groups:
        if group.handle is not None and group.carrier is None:
            group.carrier = MessageCarrier(group)
