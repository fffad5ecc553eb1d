"""Part B: whole training steps (forward, backward, AdamW) of a small Llama on two ranks.

Programs that cut parameters are trained at one size; those that keep them whole at three, since what a
collective costs beside its bytes shows at the small ones. All losses are compared with one device's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from benchmarks.record import Sample, Spread, Table, across_ranks, interleave
from benchmarks.shard import counting
from benchmarks.shard.blocks import agree
from benchmarks.shard.llama import BATCH, SEQUENCE, VOCABULARY, LlamaSize
from benchmarks.shard.training_rows import REPLICATED, ROWS, SHARDED, Step, single_device

NUM_RANKS = 2
WARMUP_STEPS = 3
TOLERANCE = 1e-4


@dataclasses.dataclass
class Trained:
    """What one rank learned about one row."""

    failure: str | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    traffic: counting.Traffic | None = None
    samples: list[Sample] = dataclasses.field(default_factory=list)


def experiments(num_layers: int) -> list[tuple[LlamaSize, list[str]]]:
    """Which rows are trained together, and at which size."""
    found = [(LlamaSize(num_layers, 512), [row.name for row in SHARDED])]
    for hidden in (64, 256, 512):
        found.append((LlamaSize(num_layers, hidden), [row.name for row in REPLICATED]))
    return found


def first_losses(step: Step, average: bool) -> list[float]:
    """The losses of the first steps; `average` over ranks where each sees its own part."""
    losses = torch.tensor([float(step()) for _ in range(WARMUP_STEPS)], dtype=torch.float64)
    if average:
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return losses.tolist()


def train_rows(names: Sequence[str], size: LlamaSize, rounds: int) -> dict[str, Trained]:
    """Runs on every rank."""
    trained, steps = {}, {}
    for name in names:
        row = trained[name] = Trained()
        try:
            step = ROWS[name].build(size)
            row.losses = first_losses(step, ROWS[name].average)
            row.traffic = counting.of_training(step, NUM_RANKS)
            steps[name] = step
        except Exception as error:  # a row may fail in any way; the table says how
            first_line = (str(error).strip() or "no message").splitlines()[0]
            row.failure = f"{type(error).__name__}: {first_line}"[:160]
        row.failure = agree(row.failure)
        if row.failure is not None:
            steps.pop(name, None)
    for name, samples in interleave(steps, rounds, 1, before=dist.barrier).items():
        trained[name].samples = samples
    return trained


def single_losses(size: LlamaSize) -> list[float]:
    step = single_device(size)
    return [float(step()) for _ in range(WARMUP_STEPS)]


def training_table(
    names: Sequence[str], size: LlamaSize, rounds: int
) -> tuple[Table, dict[str, Any]]:
    """Launch ranks, train, and lay the findings out; also the raw samples."""
    wanted = run_ranks(1, single_losses, size)[0]
    by_rank = run_ranks(NUM_RANKS, train_rows, names, size, rounds)
    merged = across_ranks([{n: t.samples for n, t in found.items()} for found in by_rank])
    columns = (
        "program",
        "transport",
        "wall ms a step",
        "CPU ms a step",
        "peer / this, wall",
        "peer / this, CPU",
        "collectives",
        "rel. loss error",
        "note",
    )
    title = f"Training step with AdamW, Llama of {size.num_layers} layers, hidden {size.hidden}, "
    title += f"sequence {SEQUENCE}, vocabulary {VOCABULARY}, batch {BATCH}, {NUM_RANKS} ranks"
    notes = (
        f"{rounds} interleaved rounds of one step after {WARMUP_STEPS + 2} warm-up steps; median "
        "(quartiles); CPU: all threads of a rank, mean of ranks; wall: the slower rank",
        "one compute thread a rank (gloo has its own); freed memory stays with the processes, for every "
        "program alike; transport own: shared memory between ranks of one machine",
        "collectives of one step, as posted to process groups or started by hyperparallel; an all-reduce "
        "of DDP is a bucket",
        f"the loss error is the largest of the first {WARMUP_STEPS} steps against one device",
    )
    raw = {name: [dataclasses.astuple(s) for s in taken] for name, taken in merged.items()}
    table = Table(title, columns, tuple(laid_out(by_rank[0], merged, wanted)), notes)
    return table, {f"train {size.name}, {', '.join(names)}": raw}


def laid_out(
    trained: dict[str, Trained], merged: dict[str, list[Sample]], wanted: Sequence[float]
) -> list[tuple[Any, ...]]:
    """The rows of the table."""
    cpu = {n: Spread.of([s.cpu_seconds for s in taken]) for n, taken in merged.items() if taken}
    wall = {n: Spread.of([s.wall_seconds for s in taken]) for n, taken in merged.items() if taken}
    rows: list[tuple[Any, ...]] = []
    for name, row in trained.items():
        known = ROWS[name]
        if row.failure is not None:
            rows.append((name, known.transport, *[None] * 6, f"failed: {row.failure}"))
            continue
        faster: list[float | None] = [None, None]
        if known.peer in cpu:
            faster = [round(t[known.peer].median / t[name].median, 2) for t in (wall, cpu)]
        error = max(abs(a - b) / abs(b) for a, b in zip(row.losses, wanted, strict=True))
        rows.append(
            (
                name,
                known.transport,
                wall[name].text(1e3, 0),
                cpu[name].text(1e3, 0),
                *faster,
                row.traffic.text() if row.traffic else None,
                error,
                "" if error < TOLERANCE else "WRONG RESULT",
            )
        )
    return rows
