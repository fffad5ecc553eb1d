"""Times the devices and the links between them, and describes them as a cluster.

All ranks do the same at the same time. A call is timed in a queue of many, between two moments of the device
(events on CUDA), so that starting it from Python counts only where nothing hides it. The arithmetic from
timings to a description is that of `cluster/calibration.py`; a CUDA device has many units, of which a
collective takes a few.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hyperparallel.cluster import Cluster
from hyperparallel.cluster.calibration import Collective, Matmul, Timings, describe
from hyperparallel.runtime.calibrate.calibrate import disk_rates
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {
    "cuda": ((1024, 256, 256), (1024, 1024, 256), (4096, 1024, 1024), (4096, 4096, 4096), (8192, 4096, 64)),
    "cpu": ((128, 256, 256), (256, 256, 64), (256, 256, 512)),
}
COUNTS = {"cuda": (1 << 20, 1 << 24, 1 << 27), "cpu": (1 << 16, 1 << 20)}
MESSAGES = {"cuda": (1 << 8, 1 << 16, 1 << 20, 1 << 24), "cpu": (1 << 8, 1 << 16, 1 << 20)}
COLLECTIVE_UNITS = 16
"""Of a CUDA device: thread blocks of NCCL's on a unit each, at full speed of the links."""
STRETCH_S = 0.05


def described(num_ranks: int, folder: Path) -> Cluster:
    """Time `num_ranks` ranks, each on its device, and describe them as the cluster "this-machine"."""
    found = launch(_timed, num_ranks, args=(num_ranks,), timeout=120, threads=1)
    timings, name, units = found[0]
    read, write = disk_rates(folder, 64 << 20)
    free = shutil.disk_usage(folder).free
    timings = replace(timings, disk_read_bytes_s=read, disk_write_bytes_s=write, disk_bytes=free)
    cluster = describe(timings, time.strftime("on %Y-%m-%d"))
    busy = min(float(COLLECTIVE_UNITS), cluster.device.collective_units * units)
    device = replace(cluster.device, name=name, units=units, collective_units=busy)
    fabric = tuple(replace(tier, name="links") for tier in cluster.fabric)
    return replace(cluster, name="this-machine", device=device, fabric=fabric)


def _timed(session: Session, num_ranks: int) -> tuple[Timings, str, int]:
    """One rank's timings, its device's name and units."""
    device, kind = session.device, session.device.type
    torch.manual_seed(0)
    matmuls: dict[str, list[Matmul]] = {}
    for (name, dtype), (m, n, k) in itertools.product(FORMATS.items(), SHAPES[kind]):
        a, b = torch.rand(m, k, device=device, dtype=dtype), torch.rand(k, n, device=device, dtype=dtype)
        row = Matmul(m, n, k, seconds_of(lambda a=a, b=b: torch.mm(a, b), device))
        matmuls.setdefault(name, []).append(row)
    memory = []
    for count in COUNTS[kind]:
        x, y = torch.rand(count, device=device), torch.rand(count, device=device)
        memory.append((12.0 * count, seconds_of(lambda x=x, y=y: torch.add(x, y), device)))
    small = torch.rand(16, device=device)
    host = torch.rand(1 << 22, pin_memory=kind == "cuda")
    copied = seconds_of(lambda: host.to(device, non_blocking=True, copy=True), device)
    total, label, units = properties(device)
    timings = Timings(
        ranks=num_ranks,
        threads=1,
        matmuls=matmuls,
        memory=memory,
        launch_s=seconds_of(lambda: small.add_(1.0), device),
        collectives=list(_collectives(session, MESSAGES[kind])),
        copy_bytes_s=4 * host.numel() / copied,
        disk_read_bytes_s=1e9,
        disk_write_bytes_s=1e9,
        memory_bytes=2.0 * num_ranks * total,  # `describe` gives half of a machine's memory to its ranks
        disk_bytes=1e9,
    )
    return timings, label, units


def properties(device: torch.device) -> tuple[int, str, int]:
    """Bytes of memory, name and units of a device."""
    if device.type == "cpu":
        return 4 << 30, "cpu-rank", 1
    found = torch.cuda.get_device_properties(device)
    return found.total_memory, found.name, found.multi_processor_count


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call in a long queue of them: the median of three queues."""
    call()
    rough = _queue(call, 3, device)
    calls = max(3, min(2000, int(STRETCH_S / max(rough, 1e-7))))
    return statistics.median(_queue(call, calls, device) for _ in range(3))


def _queue(call: Callable[[], object], calls: int, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / calls


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collectives(session: Session, messages: tuple[int, ...]) -> Iterator[Collective]:
    """All ranks together; every rank makes the same number of calls."""
    n, group = session.world_size, session.groups.world
    if n == 1:
        return
    for kind, count in itertools.product(("all_reduce", "all_gather", "reduce_scatter"), messages):
        share = [count // n] * n
        x = torch.rand(sum(share), device=session.device)
        piece = x[: share[0]].clone()
        start = {
            "all_reduce": lambda x=x: collectives.all_reduce_start(x, "sum", group),
            "all_gather": lambda p=piece, s=share: collectives.all_gather_start(p, 0, s, group),
            "reduce_scatter": lambda x=x, s=share: collectives.reduce_scatter_start(x, 0, s, "sum", group),
        }[kind]
        for _ in range(3):
            collectives.wait(start())
        dist.barrier()
        seconds = _queue(lambda start=start: collectives.wait(start()), 20, session.device)
        wire = 4.0 * count * (n - 1) / n * (2 if kind == "all_reduce" else 1)
        yield Collective(kind, n, wire, seconds)
