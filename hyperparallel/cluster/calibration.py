"""From timings of this machine to its description: the arithmetic of `hyperparallel doctor --calibrate`.

Timings are seconds per call on one rank while all ranks of the machine do the same, so a description holds
for that number of ranks: four ranks on two cores each get half a core. They are taken in
`runtime/calibrate/calibrate.py`.

    matrix product   launch + 2 m n k / (peak * k / (k + half_k)): peak and half_k by least squares of the
                     logarithm (the error of a time is a factor), half_k from fp32 for all formats
    memory           median of bytes per second over tensor sizes; each is in `source`
    collective       latency + bytes on the wire / bandwidth, over kinds, group sizes and tensor sizes

    kernels          as timed, and so the two halves of a collective (`cluster/threads.py`)

The peak is what the best shapes reach, not what the data sheet says, so `Gemm.peak` is 1. A rank has nothing
that computes while it communicates: a collective holds nearly all its units. "host" is the same memory as
"device", half of it each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier
from hyperparallel.cluster.threads import Points, Threads

HELD = 0.99
"""Share of a rank's cores that a collective holds: its own thread moves the bytes."""

_LEAST_CAPACITY = 1e9


@dataclass(frozen=True)
class Matmul:
    """One matrix product m x n x k, timed."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class Collective:
    """One collective of a group, timed: bytes that each member receives; core seconds of its own thread."""

    kind: str
    group: int
    wire_bytes: float
    seconds: float
    start_core_s: float = 0.0
    wait_core_s: float = 0.0


@dataclass(frozen=True)
class Timings:
    """What was measured, with `ranks` ranks of `threads` threads at work together.

    matmuls: by number format. memory: (bytes read and written, seconds) of one elementwise op. launch_s: of
    an op on next to nothing. copy_bytes_s: of a tensor to other memory. disk_*: bytes per second of one rank
    alone. memory_bytes, disk_bytes: what the machine has. cores: that the ranks share; slice_s: how long one
    keeps its core while others want it. call_core_s: core seconds of an op that touches nothing. kernels: op
    -> (work, core seconds); without any, ranks are not described as threads. reuse: (bytes touched before the
    same again, core seconds per byte).
    """

    ranks: int
    threads: int
    matmuls: Mapping[str, Sequence[Matmul]]
    memory: Sequence[tuple[float, float]]
    launch_s: float
    collectives: Sequence[Collective]
    copy_bytes_s: float
    disk_read_bytes_s: float
    disk_write_bytes_s: float
    memory_bytes: float
    disk_bytes: float
    cores: int = 1
    slice_s: float = 3e-3
    call_core_s: float = 1e-6
    kernels: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    reuse: Sequence[tuple[float, float]] = ()


def describe(timings: Timings, measured_on: str) -> Cluster:
    """The machine as a cluster of `timings.ranks` devices; measured_on: words for its sources (a date)."""
    source = f"measured {measured_on}, {timings.ranks} ranks of {timings.threads} threads at once"
    device, rates = _device(timings, source), [count / seconds for count, seconds in timings.memory]
    # Half the memory plays the device, half the host: they are one, and no tensor lies in both.
    own = max(_LEAST_CAPACITY, timings.memory_bytes / 2 / timings.ranks)
    memory_rate = device.memory_bytes_s
    copy_rate = min(timings.copy_bytes_s, memory_rate)
    ranks = timings.ranks
    memory = (
        Tier("device", own, memory_rate, memory_rate, source=f"{source}: {_range_words(rates)} by size"),
        Tier("host", own * ranks, copy_rate, copy_rate, shared_by=ranks, source=f"{source}: copies"),
        Tier(
            "disk",
            max(_LEAST_CAPACITY, timings.disk_bytes),
            min(timings.disk_read_bytes_s, memory_rate),
            timings.disk_write_bytes_s,
            shared_by=ranks,
            total_bytes_s=max(timings.disk_read_bytes_s, timings.disk_write_bytes_s),
            source=f"measured {measured_on}: one file past the page cache",
        ),
    )
    notes = (f"Measured with {ranks} ranks at once; other numbers of ranks extrapolate.",)
    return Cluster("laptop", device, memory, _fabric(timings, source, memory_rate), notes)


def _device(timings: Timings, source: str) -> Device:
    # One for all formats: a device has one, and fp32 is timed in the most shapes.
    half_k = fit_half_k(timings.matmuls["fp32"], timings.launch_s)
    fits = {name: fit_peak(rows, timings.launch_s, half_k) for name, rows in timings.matmuls.items()}
    errors = ", ".join(f"{name} {error:.0%}" for name, (_, error) in fits.items())
    return Device(
        name="cpu-rank",
        peak_flop_s={name: peak for name, (peak, _) in fits.items()},
        memory_bytes_s=float(np.median([count / seconds for count, seconds in timings.memory])),
        launch_s=timings.launch_s,
        units=timings.threads,
        collective_units=HELD * timings.threads,
        gemm=Gemm(peak=1.0, tile_m=1, tile_n=1, half_k=half_k),
        threads=_threads(timings, source) if timings.kernels else None,
        source=f"{source}; matrix products fit within {errors} (median)",
    )


def _threads(timings: Timings, source: str) -> Threads:
    halves: dict[str, dict[str, Points]] = {"start": {}, "wait": {}}
    for half, found in halves.items():
        points: dict[str, dict[float, float]] = {}
        for row in timings.collectives:
            seconds = max(getattr(row, f"{half}_core_s"), 1e-7)
            points.setdefault(f"{row.kind} of {row.group}", {})[row.wire_bytes] = seconds
        found.update({name: _points(known) for name, known in points.items()})
    return Threads(
        cores=timings.cores,
        slice_s=_short(timings.slice_s),
        call_s=_short(timings.call_core_s),
        kernels={name: _points(dict(points)) for name, points in timings.kernels.items()},
        starts=halves["start"],
        waits=halves["wait"],
        reuse=_points(dict(timings.reuse)),
        source=f"{source}, core seconds",
    )


def _points(known: Mapping[float, float]) -> Points:
    return tuple((work, _short(known[work])) for work in sorted(known))


def _short(seconds: float) -> float:
    """Three digits: no timing is better than that."""
    return float(f"{seconds:.3g}")


def fit_peak(rows: Sequence[Matmul], launch_s: float, half_k: float) -> tuple[float, float]:
    """(FLOP/s, median relative error of the seconds) that fit the timings best at that half_k.

    >>> fit_peak([Matmul(100, 100, 100, 2e6 / 1e9 + 1e-6)], 1e-6, 0.0)
    (1000000000.0, 0.0)
    """
    # The mean of logarithms: a time's error is a factor, and large products must not decide alone.
    needed, seconds = _needed(rows, half_k), _seconds(rows, launch_s)
    peak = float(f"{np.exp(np.mean(np.log(needed / seconds))):.6g}")  # no timing is better than that
    return peak, round(float(np.median(np.abs(needed / peak / seconds - 1))), 6)


def fit_half_k(rows: Sequence[Matmul], launch_s: float) -> float:
    """The half_k, from 0 to 1000, at which one peak fits the timings best."""
    candidates = np.concatenate([[0.0], np.geomspace(1.0, 1000.0, 61)])
    seconds = _seconds(rows, launch_s)
    # At the right half_k all products give one peak: the least variance of its logarithm.
    spread = [np.var(np.log(_needed(rows, half_k) / seconds)) for half_k in candidates]
    return round(float(candidates[int(np.argmin(spread))]), 1)


def _needed(rows: Sequence[Matmul], half_k: float) -> npt.NDArray[np.float64]:
    """FLOPs of each product, raised by what its short sums lose."""
    shapes = np.array([(row.m, row.n, row.k) for row in rows], dtype=np.float64)
    m, n, k = shapes.T
    return np.asarray(2 * m * n * (k + half_k))


def _seconds(rows: Sequence[Matmul], launch_s: float) -> npt.NDArray[np.float64]:
    seconds = np.array([row.seconds for row in rows])
    # A launch that took as long as the product itself leaves at least a tenth to be fitted.
    return np.maximum(seconds - launch_s, seconds / 10)


def fit_link(rows: Sequence[Collective]) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of `latency + wire_bytes / rate`, best in the logarithm.

    The latency is tried on a grid between a hundredth and twice the shortest time; for each, the rate that
    fits the long ones is refined by Gauss-Newton on the logarithm.
    """
    sizes, seconds = (
        np.array(column) for column in zip(*[(r.wire_bytes, r.seconds) for r in rows], strict=True)
    )
    best = (float("inf"), 0.0, 1.0)
    for latency in np.min(seconds) * np.geomspace(0.01, 1.5, 200):
        per_byte = float(seconds[np.argmax(sizes)] / np.max(sizes))
        for _ in range(20):
            model = latency + sizes * per_byte
            # Long messages tell the rate, short ones the latency: the slope weighs them so.
            slope = sizes * per_byte / model  # of log(model) over log(per_byte)
            step = float(np.dot(slope, np.log(seconds / model)) / (np.dot(slope, slope) + 1e-12))
            per_byte *= float(np.exp(np.clip(step, -1.0, 1.0)))
        loss = float(np.sum(np.log(seconds / (latency + sizes * per_byte)) ** 2))
        best = min(best, (loss, float(latency), 1 / per_byte))
    return best[1], best[2]


def _fabric(timings: Timings, source: str, fastest: float) -> tuple[Fabric, ...]:
    if timings.ranks == 1:
        return ()
    latency_s, bytes_s = fit_link(timings.collectives)
    kinds = sorted({f"{row.kind} of {row.group}" for row in timings.collectives})
    words = f"{source}: {', '.join(kinds)}"
    return (
        Fabric("shared-memory", "switch", (timings.ranks,), min(bytes_s, fastest), latency_s, source=words),
    )


def _range_words(rates: Sequence[float]) -> str:
    return f"{min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s"
