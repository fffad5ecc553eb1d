"""Part C: seconds from a module to one rank's program, over growing depth.

`hp.derive` is timed, in a process of its own per depth: capture, extract, decide, partition;
no weights are cut and no step is run. Published for comparison, not run here: AutoParallel's
`applies` takes 4, 12 and 111 s for 2, 8 and 32 layers, on another machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.ranks import RankError, run_ranks
from benchmarks.record import Table
from benchmarks.shard.llama import LlamaSize, make_batch, make_llama

AUTO_PARALLEL_SECONDS = {2: 4.0, 8: 12.0, 32: 111.0}


def planning_seconds(num_layers: int) -> tuple[float, float]:
    """Wall and CPU seconds to make rank 0's program for tp2."""
    import hyperparallel as hp

    model, batch = make_llama(LlamaSize(num_layers)), make_batch()
    mesh = hp.Layout((2,), ("tp",))
    plan = hp.Plan(
        mesh,
        params={"*.o_proj.weight": mesh(None, "tp"), "*.down_proj.weight": mesh(None, "tp")},
    )
    wall, cpu = time.perf_counter(), time.process_time()
    hp.derive(model, plan, batch)
    return time.perf_counter() - wall, time.process_time() - cpu


def in_fresh_process(num_layers: int) -> tuple[float, float] | str:
    """Depths don't share caches; a failure comes back as its text."""
    try:
        return run_ranks(1, planning_seconds, num_layers, timeout_seconds=240)[0]
    except RankError as error:
        return str(error).strip().splitlines()[-1][:160]


def planning_table(depths: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """One row per depth."""
    rows: list[tuple[Any, ...]] = []
    raw: dict[str, Any] = {}
    first: float | None = None
    for depth in depths:
        found = in_fresh_process(depth)
        published = AUTO_PARALLEL_SECONDS.get(depth)
        if isinstance(found, str):
            rows.append((depth, None, None, None, published, f"failed: {found}"))
            continue
        wall, cpu = found
        first = first or wall
        growth = round(wall / first, 2)
        rows.append((depth, round(wall, 2), round(cpu, 2), growth, published, ""))
        raw[str(depth)] = found
    columns = (
        "layers",
        "wall s",
        "CPU s",
        "against the first row",
        "AutoParallel wall s, as published",
        "note",
    )
    title = "Capture + decide + partition"
    notes = ("one run per depth, each in a fresh process, imports done before",)
    return Table(title, columns, tuple(rows), notes), {"planning": raw}
