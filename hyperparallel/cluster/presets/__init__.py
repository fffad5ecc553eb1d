"""Machines that are known by name: `preset("h100", 64)`.

Each is a function that returns a `Cluster`, in a file with its relatives; every number carries its source
there, and says so where it is inferred. `preset` resizes: 98,304 cards are `preset("h100", 98304)`.
"""

from __future__ import annotations

from collections.abc import Callable

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets.nvidia import a100, h100, h800
from hyperparallel.errors import ClusterError, nearest

PRESETS: dict[str, Callable[[], Cluster]] = {
    "a100": a100,
    "h100": h100,
    "h800": h800,
}


def preset(name: str, devices: int | None = None) -> Cluster:
    """The machine of that name, with `devices` devices where given.

    An unknown name is a `ClusterError` with the near ones; so is a count that the fabric cannot have.

    >>> preset("h100", 16).dims
    (8, 2)
    """
    if name not in PRESETS:
        near = nearest(name.lower(), PRESETS)
        raise ClusterError("cluster", name, f"a file, or one of {', '.join(PRESETS)}", near)
    cluster = PRESETS[name]()
    return cluster if devices is None else cluster.resized(devices)
