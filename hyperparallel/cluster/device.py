"""One device: how fast it computes, reads its memory, starts kernels, and suffers from communication.

A matrix product m x n x k runs at `peak_flop_s * Gemm.efficiency(m, n, k)`:

    efficiency = peak * (m / ceil(m, tile_m)) * (n / ceil(n, tile_n)) * k / (k + half_k)

the share of full tiles (tile quantisation), and a ramp for the prologue of the sum over k. Waves of tiles
over `units` are left to who prices an op, because several products may run at once. Clocks that drop under
load are in `peak`. Kernels that are bound by memory run at `memory_bytes_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hyperparallel.cluster import bounds
from hyperparallel.cluster.threads import Threads
from hyperparallel.errors import ClusterError, nearest

NUMBER_FORMATS = ("bf16", "fp16", "tf32", "fp32", "fp8", "mxfp8", "nvfp4", "mxfp4", "int8")
"""Number formats that a peak may be given for; all without structured sparsity."""


@dataclass(frozen=True)
class Gemm:
    """How near to peak a dense matrix product comes; the defaults suit NVIDIA data-centre GPUs.

    peak: share of the peak that big square products reach. tile_m, tile_n: rows and columns of one output
    tile. half_k: length of the inner sum at which half of that is reached. attention: share of that
    speed which the vendor's fused attention reaches at 128 elements a head. open_attention: speed of open
    fused kernels in these units, against that on the devices that they were written for (Ampere).
    """

    peak: float = 0.85
    tile_m: int = 128
    tile_n: int = 128
    half_k: float = 64.0
    attention: float = 0.8
    open_attention: float = 1.0

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        bounds.check_fraction("device.gemm.peak", self.peak)
        bounds.check_fraction("device.gemm.attention", self.attention)
        bounds.check_fraction("device.gemm.open_attention", self.open_attention)
        bounds.check_count("device.gemm.tile_m", self.tile_m)
        bounds.check_count("device.gemm.tile_n", self.tile_n)
        bounds.check_count("device.gemm.half_k", self.half_k, least=0)

    def efficiency(self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Share of the device's peak that an m x n x k product reaches; works on arrays.

        >>> round(float(Gemm().efficiency(4096, 4096, 4096)), 3)
        0.837
        >>> round(float(Gemm().efficiency(1, 4096, 4096)), 4)  # one row fills 1/128 of a tile
        0.0065
        """
        rows, columns, inner = (np.asarray(size, dtype=np.float64) for size in (m, n, k))
        tiles_m = np.ceil(rows / self.tile_m) * self.tile_m
        tiles_n = np.ceil(columns / self.tile_n) * self.tile_n
        used = (rows / np.maximum(tiles_m, 1)) * (columns / np.maximum(tiles_n, 1))
        return np.asarray(self.peak * used * inner / np.maximum(inner + self.half_k, 1))


@dataclass(frozen=True)
class Device:
    """One device as a program sees it (a GPU, one die of a two-die package, a CPU rank).

    peak_flop_s: dense peak by number format (`NUMBER_FORMATS`). memory_bytes_s: of its own memory.
    launch_s: one small kernel, back to back, as part of a long queue. units: SMs, AI cores or CPU cores.
    collective_units: units that one collective takes at full link speed. comm_slowdown: factor (1.0 none)
    by which compute becomes slower while a collective runs beside it. threads: of devices that are threads of
    one machine, what their cores do. source: where the numbers come from.
    """

    name: str
    peak_flop_s: Mapping[str, float] = field(hash=False)
    memory_bytes_s: float
    launch_s: float = 4e-6
    units: int = 1
    collective_units: float = 0.0
    comm_slowdown: float = 1.0
    gemm: Gemm = Gemm()
    threads: Threads | None = None
    source: str = ""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not self.peak_flop_s:
            allowed = f"a peak for at least one of {', '.join(NUMBER_FORMATS)}"
            raise ClusterError("device.peak_flop_s", {}, allowed)
        for dtype, peak in self.peak_flop_s.items():
            if dtype not in NUMBER_FORMATS:
                near = nearest(dtype, NUMBER_FORMATS)
                raise ClusterError("device.peak_flop_s", dtype, ", ".join(NUMBER_FORMATS), near)
            bounds.check_bounds(f"device.peak_flop_s.{dtype}", peak, bounds.PEAK)
        bounds.check_bounds("device.memory_bytes_s", self.memory_bytes_s, bounds.MEMORY_RATE)
        bounds.check_bounds("device.launch_s", self.launch_s, bounds.LATENCY)
        bounds.check_count("device.units", self.units)
        if not 0 <= self.collective_units <= self.units:
            raise ClusterError("device.collective_units", self.collective_units, f"0 to {self.units} units")
        if not 1.0 <= self.comm_slowdown <= 10.0:
            allowed = "1.0 (compute is not slowed) to 10.0"
            raise ClusterError("device.comm_slowdown", self.comm_slowdown, allowed)

    def peak(self, dtype: str) -> float:
        """FLOP/s for `dtype`; a `ClusterError` names the formats that the device has.

        >>> Device("d", {"bf16": 1e14}, 1e12).peak("bf16")
        100000000000000.0
        """
        if dtype not in self.peak_flop_s:
            allowed = f"a format that {self.name} has: {', '.join(self.peak_flop_s)}"
            raise ClusterError("dtype", dtype, allowed)
        return self.peak_flop_s[dtype]
