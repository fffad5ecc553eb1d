"""Collectives between local ranks: `python -m benchmarks.collectives`.

Three ways to make the same collective on CPU tensors, interleaved in the same ranks: torch's
functional collectives over gloo (what hand-written code calls), the process group's own methods
over gloo (`runtime/comm/process_group.py`), and shared memory (`runtime/comm/shm.py`). Sizes are bytes of the
tensor that one rank puts in; a gather and a scatter put in or get out a rank's share of it. Wall
time is the slowest rank's, CPU time the mean rank's over all its threads. Writes
results/collectives.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from benchmarks.record import Report, Sample, Spread, Table, across_ranks, interleave
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.group import Group
from hyperparallel.runtime.comm.groups import Groups
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session

SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24))
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PEERS = ("functional gloo", "direct gloo", "shared memory")

Step = Callable[[], object]


def ours(kind: str, x: Tensor, group: Group) -> Step:
    n = group.size
    share = [x.numel() // n] * n
    wait = collectives.wait
    if kind == "all_reduce":
        return lambda: wait(collectives.all_reduce_start(x, "sum", group))
    if kind == "all_gather":
        piece = x[: share[0]].clone()
        return lambda: wait(collectives.all_gather_start(piece, 0, share, group))
    if kind == "reduce_scatter":
        return lambda: wait(collectives.reduce_scatter_start(x, 0, share, "sum", group))
    assert kind == "all_to_all", f"no call for {kind}"
    return lambda: wait(collectives.all_to_all_start(x, 0, share, 0, share, group))


def theirs(kind: str, x: Tensor, group: dist.ProcessGroup, n: int) -> Step:
    share = x.numel() // n
    wait = functional.wait_tensor
    if kind == "all_reduce":
        return lambda: wait(functional.all_reduce(x, "sum", group))
    if kind == "all_gather":
        piece = x[:share].clone()
        return lambda: wait(functional.all_gather_single(piece, 0, group))
    if kind == "reduce_scatter":
        return lambda: wait(functional.reduce_scatter_single(x, "sum", 0, group))
    assert kind == "all_to_all", f"no call for {kind}"
    return lambda: wait(functional.all_to_all_single(x, [share] * n, [share] * n, group))


def rank_main(
    session: Session, sizes: tuple[int, ...], rounds: int, dtype: torch.dtype
) -> dict[str, list[Sample]]:
    plain = Groups.of_default(transport="messages").world
    shared = session.groups.world
    assert type(shared.transport).__name__ == "SharedMemoryTransport"
    samples: dict[str, list[Sample]] = {}
    for size in sizes:
        x = torch.ones(size // dtype.itemsize, dtype=dtype)
        steps = max(1, min(30, (8 << 20) // size))
        for kind in KINDS:
            rows: Mapping[str, Step] = {
                f"{kind}/{size}/functional gloo": theirs(kind, x, plain.handle, plain.size),
                f"{kind}/{size}/direct gloo": ours(kind, x, plain),
                f"{kind}/{size}/shared memory": ours(kind, x, shared),
            }
            for step in rows.values():
                step()
            samples.update(interleave(rows, rounds, steps, before=dist.barrier))
    return samples


def table(num_ranks: int, dtype: torch.dtype, samples: Mapping[str, list[Sample]]) -> Table:
    rows = []
    keys = dict.fromkeys(name.rpartition("/")[0] for name in samples)
    for key in keys:
        kind, _, size = key.partition("/")
        by_peer = [samples[f"{key}/{peer}"] for peer in PEERS]
        cpu = [Spread.of([s.cpu_seconds for s in row]) for row in by_peer]
        wall = [Spread.of([s.wall_seconds for s in row]) for row in by_peer]
        texts = [spread.text(1e6, 0) for spread in (*cpu, *wall)]
        gains = (cpu[0].median / cpu[2].median, wall[0].median / wall[2].median)
        rows.append((kind, int(size) >> 10, *texts, *gains))
    columns = ("collective", "KiB")
    columns += tuple(f"CPU us, {peer}" for peer in PEERS)
    columns += tuple(f"wall us, {peer}" for peer in PEERS)
    columns += ("CPU, functional / shared", "wall, functional / shared")
    return Table(f"{num_ranks} ranks, {str(dtype).removeprefix('torch.')}", columns, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    tables, raw = [], {}
    for num_ranks in given.ranks:
        arguments = (tuple(given.sizes), given.rounds, dtype)
        by_rank: list[Any] = launch(rank_main, num_ranks, args=arguments, threads=1)
        samples = across_ranks(by_rank)
        tables.append(table(num_ranks, dtype, samples))
        raw[str(num_ranks)] = {
            name: [(s.wall_seconds, s.cpu_seconds) for s in row] for name, row in samples.items()
        }
    notes = (
        "medians (quartiles) of interleaved rounds; wall: slowest rank; CPU: mean rank",
        "more ranks than cores: ranks take turns, which is what the 4-rank table shows here",
    )
    report = Report("collectives", "Collectives between local ranks", tuple(tables), notes, raw=raw)
    if not given.dry:
        report.write()
    for made in tables:
        print(made.markdown())


if __name__ == "__main__":
    main()
