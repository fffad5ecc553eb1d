"""Time the rows of one table on all devices, interleaved, every loss checked against one device.

A row that can't be built or run says why in the table and its traceback stands in the log; the others are
timed. The part fails if one of our rows did, or is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.machine import synchronize
from benchmarks.gpu.rows import ALONE, BLOCK_ROWS, STEP_ROWS, Row, Step
from benchmarks.record import Report, Spread, Table
from benchmarks.shard.blocks import agree
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session

TABLES = {"block": BLOCK_ROWS, "step": STEP_ROWS}
WRONG = 1e-3
"""Relative difference of a loss that float32 in another order of sums does not make."""
CHECKED_STEPS = 3
ROUNDS = 7
SECONDS = 15.0
"""For the timing of a table, after everything is built."""


@dataclass
class Found:
    """One row: the losses of its first steps, seconds a step, or why there are none."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


def timed(session: Session, which: str) -> dict[str, Found]:
    """Runs on every rank."""
    device = session.device
    found, steps = {}, {}
    for row in TABLES[which]:
        if row.several and session.world_size == 1:
            continue
        found[row.name], step = built(row, device)
        if step is not None:
            steps[row.name] = step
    stop, rounds = time.monotonic() + SECONDS, 0
    while rounds < ROUNDS and not _any_rank(rounds > 1 and time.monotonic() > stop):
        for name, step in steps.items():
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            step()
            step()
            synchronize(device)
            found[name].seconds.append((time.perf_counter() - begin) / 2)
        rounds += 1
    return found


def _any_rank(mine: bool) -> bool:
    votes: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(votes, mine)
    return any(votes)


def built(row: Row, device: torch.device) -> tuple[Found, Step | None]:
    """Build a row and do its first steps; all ranks go on with it, or none."""
    found, step = Found(), None
    try:
        step = row.build(device)
        found.losses = [float(step()) for _ in range(CHECKED_STEPS)]
    except Exception as error:  # a row may fail in any way; the table says how
        traceback.print_exc()
        first_line = (str(error).strip() or "no message").splitlines()[0]
        found.failure = f"{type(error).__name__}: {first_line}"[:160]
    found.failure = agree(found.failure)
    return found, None if found.failure else step


def laid_out(which: str, found: Mapping[str, Found], where: str) -> tuple[Table, bool]:
    """The table, and whether all of our rows ran and are right."""
    true = found[ALONE].losses if ALONE in found else []
    middle = {name: Spread.of(one.seconds) for name, one in found.items() if one.seconds}
    rows, good = [], True
    for row in TABLES[which]:
        if row.name not in found:
            continue
        one = found[row.name]
        mine = row.name.startswith("hyperparallel")
        if one.failure is not None:
            rows.append((row.name, None, None, None, f"failed: {one.failure}"))
            good = good and not mine
            continue
        pairs = zip(one.losses, true, strict=False)
        error = max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))
        peer = row.versus if row.versus in middle else ALONE
        faster = round(middle[peer].median / middle[row.name].median, 2) if peer in middle else None
        good = good and not (mine and not error < WRONG)
        told = "" if error < WRONG else "WRONG RESULT"
        rows.append((row.name, middle[row.name].text(1e3), faster, error, told))
    columns = ("program", "ms a step (quartiles)", "peer / this", "rel. loss error", "note")
    notes = (f"peer: the row that a program is compared with, else {ALONE}; wall time of the first rank",)
    return Table(f"{which}, {where}", columns, tuple(rows), notes), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--device", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, Found] = launch(timed, given.ranks, args=(given.table,), threads=1)[0]
    table, good = laid_out(given.table, found, f"{given.ranks} ranks on {given.device}")
    Report(given.table, "Beside the peers", (table,), raw={n: vars(one) for n, one in found.items()}).write(
        given.folder
    )
    print(table.markdown())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
