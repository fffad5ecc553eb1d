"""This machine, one CPU rank a device: as `hyperparallel doctor --calibrate` measured it, else a guess.

The measured description lies in the user's cache folder (`calibrated_path`), in the form of any cluster file.
"""

from __future__ import annotations

import os
from pathlib import Path

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.files import read_cluster
from hyperparallel.cluster.memory_tiers import Tier

_GUESS = "a guess; `hyperparallel doctor --calibrate` measures it"


def calibrated_path() -> Path:
    """Where the measured description of this machine lies: $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hyperparallel" / "laptop.yaml"


def laptop() -> Cluster:
    """The measured description of this machine where there is one, else that of a common laptop."""
    path = calibrated_path()
    if path.is_file():
        return read_cluster(path)
    return guessed()


def guessed(ranks: int = 4) -> Cluster:
    """A laptop of four cores, one rank a core, before anything was measured."""
    device = Device(
        name="cpu-core",
        peak_flop_s={"fp32": 50e9, "bf16": 50e9},
        memory_bytes_s=8e9,
        launch_s=5e-6,
        units=1,
        gemm=Gemm(peak=0.9, tile_m=8, tile_n=16, half_k=16),
        source=_GUESS,
    )
    memory = (
        Tier("device", 4e9, 8e9, 8e9, source=_GUESS),
        Tier("host", 16e9, 5e9, 5e9, shared_by=ranks, total_bytes_s=10e9, source=_GUESS),
        Tier("disk", 500e9, 1e9, 0.5e9, shared_by=ranks, total_bytes_s=1e9, source=_GUESS),
    )
    fabric = (Fabric("shared-memory", "switch", (ranks,), 2e9, 50e-6, source=_GUESS),)
    return Cluster(
        "laptop", device, memory, fabric, ("Not measured: run `hyperparallel doctor --calibrate`.",)
    )
