"""A machine by what a user calls it: a cluster file, or the name of a preset."""

from __future__ import annotations

from pathlib import Path

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.files import read_cluster
from hyperparallel.cluster.presets import preset


def load_cluster(source: str | Path, devices: int | None = None) -> Cluster:
    """The cluster of a file (something with a suffix or a folder in its name), or of a preset.

    devices: resizes it. A `ClusterError` names the field of the file that is wrong, or the near presets.

    >>> load_cluster("h100", 16).dims
    (8, 2)
    """
    path = Path(source)
    if not path.is_file() and path.suffix not in (".yaml", ".yml", ".json") and len(path.parts) < 2:
        return preset(str(source), devices)
    cluster = read_cluster(path)
    return cluster if devices is None else cluster.resized(devices)
