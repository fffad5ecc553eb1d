"""Machines that are known by name: `preset("h100", 64)`.

Each is a function that returns a `Cluster`, in a file with its relatives; every number carries its source
there, and says so where it is inferred. `preset` resizes: 98,304 cards are `preset("h100", 98304)`.
"""

from __future__ import annotations

from collections.abc import Callable

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets.ascend import ascend_910b, cloudmatrix384
from hyperparallel.cluster.presets.blackwell import b200, b300, gb200_nvl72, gb300_nvl72
from hyperparallel.cluster.presets.laptop import laptop
from hyperparallel.cluster.presets.nvidia import a100, h100, h800
from hyperparallel.cluster.presets.tpu import tpu_v5p
from hyperparallel.cluster.presets.ubmesh import atlas950, atlas960, ub_mesh_1024, ub_mesh_8192
from hyperparallel.errors import ClusterError, nearest

PRESETS: dict[str, Callable[[], Cluster]] = {
    "a100": a100,
    "h100": h100,
    "h800": h800,
    "b200": b200,
    "b300": b300,
    "gb200-nvl72": gb200_nvl72,
    "gb300-nvl72": gb300_nvl72,
    "tpu-v5p": tpu_v5p,
    "ascend-910b": ascend_910b,
    "cloudmatrix384": cloudmatrix384,
    "ub-mesh-1024": ub_mesh_1024,
    "ub-mesh-8192": ub_mesh_8192,
    "atlas950-8192": atlas950,
    "atlas960-15488": atlas960,
    "laptop": laptop,
}


def preset(name: str, devices: int | None = None) -> Cluster:
    """The machine of that name (in any case, with or without dashes), with `devices` devices where given.

    An unknown name is a `ClusterError` with the near ones; so is a count that the fabric cannot have.

    >>> preset("h100", 16).dims
    (8, 2)
    """
    found = {_plain(known): known for known in PRESETS}.get(_plain(name))
    if found is None:
        raise ClusterError("cluster", name, f"a file, or one of {', '.join(PRESETS)}", nearest(name, PRESETS))
    cluster = PRESETS[found]()
    return cluster if devices is None else cluster.resized(devices)


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char not in "-_ ")
