"""Times this machine's CPU ranks: products, memory, kernels, collectives, turns, disk.

All ranks do the same thing at the same time. What a rank does by itself is timed in seconds of its thread, so
that other work on the machine doesn't count, times the turns that ranks take where they have more threads
than there are cores; collectives are timed by the clock, because they are waiting, and their halves by the
thread. A figure is the mean over ranks in the middle one of a few stretches. Kernels and the halves of
collectives stay core seconds, without turns. What is made of the timings stands in `cluster/calibration.py`.

CPU only: a machine with GPUs is described by a preset.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from hyperparallel.cluster.calibration import Collective, Matmul, Timings
from hyperparallel.runtime.calibrate.ops import COUNTS, kernels
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.group import Group
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session

SHAPES = (
    (128, 256, 256), (512, 128, 256), (512, 256, 256), (512, 512, 256), (512, 256, 512), (512, 1024, 256),
    (2048, 256, 1024), (1024, 1024, 1024), (512, 512, 32), (512, 512, 64), (512, 512, 128),
)  # fmt: skip
"""m, n, k: what small models on a laptop multiply, with short sums for `half_k`."""

TIMED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEMORY_ELEMENTS = (1 << 16, 1 << 17, 1 << 19, 1 << 21)
MESSAGE_ELEMENTS = (1 << 8, 1 << 14, 1 << 17, 1 << 20)
TIMED_KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class TimingSizes:
    """What is timed: seconds and repeats per figure (kernel_s for one kernel at one size), and the sizes."""

    stretch_s: float = 0.04
    kernel_s: float = 0.008
    repeats: int = 3
    counts: tuple[int, ...] = COUNTS
    shapes: tuple[tuple[int, int, int], ...] = SHAPES
    messages: tuple[int, ...] = MESSAGE_ELEMENTS
    disk_bytes: int = 128 << 20
    between_bytes: int = 12 << 20


FigureKey = tuple[str | float, ...]
"""Names one figure: ("fp32", m, n, k), ("memory", elements), ("kernel", name, work), ("reuse", bytes),
("launch",), ("call",), ("copy",)."""

LARGE_FLOPS = 1e8
PIECE_ELEMENTS = 1 << 14
REUSE_BYTES = tuple(12 * PIECE_ELEMENTS * 4**i for i in range(5))
"""0.2 to 50 MB: from a core's own cache to memory."""

HALVES = 8
"""Timed collectives behind other work, for each repeat."""

SPIN_S = 0.1
GAP_S = 2e-4
"""Longer between two looks at the clock means that another thread had the core."""


@dataclass(frozen=True)
class RankTimings:
    """What one rank timed: seconds per call in every stretch; collectives as they are reported."""

    threads: int
    stretches: dict[FigureKey, list[float]]
    collectives: list[Collective]
    slice_s: float = 0.0


def measure(
    ranks: int,
    cores: int,
    memory_bytes: float,
    folder: Path,
    work: TimingSizes | None = None,
    threads: int | None = None,
) -> Timings:
    """Time this machine with `ranks` ranks; about two hundred figures, half a minute.

    cores, memory_bytes: what the machine has. folder: the disk to time, in a file that is removed again.
    threads: per rank, by default the cores shared out. Raises `RunError` where ranks fail.
    """
    work = work or TimingSizes()
    found: list[RankTimings] = launch(_measure, ranks, args=(work,), timeout=600, threads=threads)
    # Seconds of a thread leave out how long it waited for a core; a step of such ranks does not.
    turns = max(1.0, ranks * found[0].threads / cores)
    alone = {key: _middle([one.stretches[key] for one in found]) for key in found[0].stretches}
    best = {key: turns * seconds for key, seconds in alone.items()}
    read, write = disk_rates(folder, work.disk_bytes)
    return Timings(
        ranks=ranks,
        threads=found[0].threads,
        matmuls={
            name: [Matmul(m, n, k, best[name, m, n, k]) for m, n, k in _shapes(name, work)]
            for name in TIMED_DTYPES
        },
        memory=[(3.0 * 4 * count, best["memory", count]) for count in MEMORY_ELEMENTS],
        launch_s=best[("launch",)],
        collectives=[_joined(same) for same in zip(*(one.collectives for one in found), strict=True)],
        copy_bytes_s=4 * MEMORY_ELEMENTS[-1] / best[("copy",)],
        disk_read_bytes_s=read,
        disk_write_bytes_s=write,
        memory_bytes=memory_bytes,
        disk_bytes=shutil.disk_usage(folder).free,
        cores=cores,
        slice_s=statistics.median(one.slice_s for one in found),
        call_core_s=alone[("call",)],
        kernels=_by_kernel(alone),
        reuse=[(size, alone["reuse", float(size)] / (12 * PIECE_ELEMENTS)) for size in REUSE_BYTES],
    )


def _by_kernel(seconds: Mapping[FigureKey, float]) -> dict[str, list[tuple[float, float]]]:
    """Kernel -> (work, core seconds)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for key, value in seconds.items():
        if key[0] == "kernel":
            found.setdefault(str(key[1]), []).append((float(key[2]), value))
    return found


def _joined(same: Sequence[Collective]) -> Collective:
    """One collective as its members timed it: the longest by the clock, the mean of their own work."""
    took_part = [row for row in same if row.seconds > 0] or same
    return replace(
        same[0],
        seconds=max(row.seconds for row in same),
        start_core_s=statistics.fmean(row.start_core_s for row in took_part),
        wait_core_s=statistics.fmean(row.wait_core_s for row in took_part),
    )


def _middle(stretches: Sequence[Sequence[float]]) -> float:
    """Seconds per call in the middle of the stretches that all ranks spent together; one list per rank.

    The best would be what no step reaches: its calls are as often unlucky as lucky.
    """
    return statistics.median(statistics.fmean(seconds) for seconds in zip(*stretches, strict=True))


def _measure(session: Session, work: TimingSizes) -> RankTimings:
    """What one rank times; every rank times the same in the same order."""
    torch.manual_seed(0)
    calls: dict[FigureKey, Callable[[], object]] = {}
    for name, dtype in TIMED_DTYPES.items():
        calls.update({(name, *shape): _product(shape, dtype) for shape in _shapes(name, work)})
    calls.update({("memory", count): _addition(count) for count in MEMORY_ELEMENTS})
    calls[("launch",)] = _addition(16)
    calls[("call",)] = lambda: torch.ops.aten.view(source, [-1])
    source, target = torch.rand(MEMORY_ELEMENTS[-1]), torch.empty(MEMORY_ELEMENTS[-1])
    calls.update({("reuse", float(distance)): _ring(distance) for distance in REUSE_BYTES})
    calls[("copy",)] = lambda: target.copy_(source)
    with torch.no_grad():
        stretches = {key: _stretches(call, work.stretch_s, work) for key, call in calls.items()}
        for name, amount, call in kernels(work.counts):
            stretches["kernel", name, amount] = _stretches(call, work.kernel_s, work)
        slice_s = _turn()
        return RankTimings(torch.get_num_threads(), stretches, list(_collectives(session, work)), slice_s)


def _shapes(name: str, work: TimingSizes) -> list[tuple[int, int, int]]:
    """Short formats without the large shapes, which take seconds on processors that lack them."""
    return [shape for shape in work.shapes if name == "fp32" or 2 * math.prod(shape) <= LARGE_FLOPS]


def _product(shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], object]:
    """In turn as a forward and the gradients of input and weight multiply: each has other strides."""
    m, n, k = shape
    a, b = torch.rand(m, k, dtype=dtype), torch.rand(k, n, dtype=dtype)
    across = torch.rand(k, m, dtype=dtype).t(), torch.rand(n, k, dtype=dtype).t()
    turns = itertools.cycle([(a, across[1]), (a, b), (across[0], b)])
    return lambda: torch.mm(*next(turns))


def _addition(count: int) -> Callable[[], object]:
    a, b = torch.rand(count), torch.rand(count)
    return lambda: torch.add(a, b)


def _turn() -> float:
    """Seconds that a thread kept its core while all ranks wanted one: median over its turns."""
    dist.barrier()
    turns: list[float] = []
    begin = turn = last = time.perf_counter()
    while last - begin < SPIN_S:
        now = time.perf_counter()
        if now - last > GAP_S:
            turns.append(last - turn)
            turn = now
        last = now
    return statistics.median(turns) if turns else SPIN_S


def _ring(distance: int) -> Callable[[], object]:
    """Adds two pieces of `distance` bytes of memory into a third, and goes on around it."""
    pieces = torch.rand(distance // (4 * PIECE_ELEMENTS), PIECE_ELEMENTS).unbind()
    turns = itertools.cycle([pieces[i : i + 3] for i in range(0, len(pieces), 3)])

    def add() -> None:
        a, b, into = next(turns)
        torch.add(a, b, out=into)

    return add


def _stretches(call: Callable[[], object], stretch_s: float, work: TimingSizes) -> list[float]:
    """Seconds of this thread per call in each of `repeats` stretches, which all ranks begin together."""
    call()
    found = []
    for _ in range(work.repeats):
        dist.barrier()
        begin, calls, elapsed = time.thread_time(), 0, 0.0
        while elapsed < stretch_s or calls % 3:  # whole turns of what alternates
            call()
            calls += 1
            elapsed = time.thread_time() - begin
        found.append(elapsed / calls)
    return found


def _collectives(session: Session, work: TimingSizes) -> Iterator[Collective]:
    """Pairs side by side, then all ranks; a rank without a partner reports no time for pairs."""
    world = session.world_size
    pairs = [(rank, rank + 1) for rank in range(0, world - 1, 2)]
    session.groups.ensure(pairs)
    mine = next((pair for pair in pairs if session.rank in pair), None)
    groups: list[tuple[int, Group | None]] = []
    if world > 2:
        groups.append((2, session.groups.get(mine) if mine else None))
    if world > 1:
        groups.append((world, session.groups.world))
    for size, group in groups:
        for kind in TIMED_KINDS:
            for count in work.messages:
                wire = 4.0 * count * (size - 1) / size * (2 if kind == "all_reduce" else 1)
                yield Collective(kind, size, wire, *_collective(kind, count, group, work))


def _collective(kind: str, count: int, group: Group | None, work: TimingSizes) -> tuple[float, float, float]:
    """Seconds per collective, and this thread's own in its start and its wait.

    All members make the same number of calls, or they would deadlock. The halves are timed behind other
    work on `between_bytes`, as between the layers of a program: buffers have left the nearest caches.
    """
    start: StartCall = _transfer(kind, count, group) if group else (lambda: None)
    longest = torch.zeros(1)
    for _ in range(3):  # the first touches new memory
        begin = time.perf_counter()
        _both(start)
        longest[0] = time.perf_counter() - begin
    # Agreed on: another number of calls on one rank would be a deadlock.
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    calls = max(3, min(2000, int(work.stretch_s / float(longest))))
    times, halves = [], []
    others = torch.zeros(work.between_bytes // 4)
    for _ in range(work.repeats):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            _both(start)
        times.append((time.perf_counter() - begin) / calls)
        for _ in range(HALVES):
            others.add_(1.0)
            halves.append(_both(start))
    starting, waiting = (statistics.median(column) for column in zip(*halves, strict=True))
    # The shortest by the clock: whatever else the machine does only makes a wait longer.
    return (min(times), starting, waiting) if group else (0.0, 0.0, 0.0)


StartCall = Callable[[], collectives.InFlight | None]


def _both(start: StartCall) -> tuple[float, float]:
    """Start and wait; this thread's seconds in each."""
    before = time.thread_time()
    pending = start()
    between = time.thread_time()
    if pending is not None:
        collectives.wait(pending)
    return between - before, time.thread_time() - between


def _transfer(kind: str, count: int, group: Group) -> StartCall:
    share = [count // group.size] * group.size
    x = torch.rand(sum(share))
    if kind == "all_reduce":
        return lambda: collectives.all_reduce_start(x, "sum", group)
    if kind == "all_gather":
        piece = x[: share[0]].clone()
        return lambda: collectives.all_gather_start(piece, 0, share, group)
    assert kind == "reduce_scatter", f"nothing here times {kind}"
    return lambda: collectives.reduce_scatter_start(x, 0, share, "sum", group)


def disk_rates(folder: Path, num_bytes: int) -> tuple[float, float]:
    """(read, write) bytes per second of one file in `folder`, past the page cache where the system allows."""
    block = os.urandom(1 << 20)
    blocks = max(1, num_bytes >> 20)
    with _scratch(folder) as descriptor:
        begin = time.perf_counter()
        for _ in range(blocks):
            os.write(descriptor, block)
        os.fsync(descriptor)
        written = time.perf_counter() - begin
        if hasattr(os, "posix_fadvise"):
            # Else the file just written is read from memory.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        begin = time.perf_counter()
        while os.read(descriptor, 1 << 20):
            pass
        read = time.perf_counter() - begin
    return blocks * len(block) / read, blocks * len(block) / written


@contextmanager
def _scratch(folder: Path) -> Iterator[int]:
    descriptor, name = tempfile.mkstemp(prefix="calibrate-", dir=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        os.unlink(name)
