"""Memory against published peaks and formulas, and collectives against NCCL's own timings.

Activations: Korthikanti et al. 2022 (arXiv:2205.05198), bytes of one layer on one rank:

    none       s b h (10 + 24 / t + 5 a s / (h t))      sp         s b h / t (34 + 5 a s / h)
    selective  s b h (10 + 24 / t)                      sp + sel.  34 s b h / t
    full       2 s b h

Weights and optimizer: Megatron-Core's distributed-optimizer guide: 18 bytes for each parameter of the first
stage, 6 + 12 / d with the optimizer cut over d ranks. Both are formulas that the measured totals of these
papers follow; measured peaks are those of the tables' "peak GiB" rows: torchtitan logs `max_reserved`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.leaderboard.case import Case, Priced, Skipped
from hyperparallel.cluster.presets import preset
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.collectives import PRICED_KINDS, collective_seconds, groups_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.memory import memory_of
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.workload.presets import gpt

NCCL_TABLE = "echo_nccl_allreduce_a100"

KORTHIKANTI = {
    "22B": (6144, 48, 64, 4, 8, 1, 1),
    "175B": (12288, 96, 96, 1, 8, 8, 3),
    "530B": (20480, 105, 128, 1, 8, 35, 3),
    "1T": (25600, 128, 160, 1, 8, 64, 1),
}
"""Hidden size, layers, heads, microbatch, tp, pp, chunks (arXiv:2205.05198 table 3)."""


@dataclass(frozen=True)
class Anchor:
    """A number of the model against a published one."""

    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def activation_anchors() -> list[Anchor]:
    """Saved bytes of a layer under each kind of recomputation, for the four models."""
    found = []
    for name, (h, layers, a, b, t, p, v) in KORTHIKANTI.items():
        s = 2048
        base, scores = float(s * b * h), 5 * a * s / h
        formulas = {
            ("none", False): base * (10 + (24 + scores) / t),
            ("none", True): base * (34 + scores) / t,
            ("selective", False): base * (10 + 24 / t),
            ("selective", True): base * 34 / t,
            ("full", False): 2 * base,
        }
        for (kind, sp), published in formulas.items():
            one = Strategy(tp=t, pp=p, virtual=v, microbatch=b, zero=0, sp=sp, recompute=kind, flash=False)  # type: ignore[arg-type]
            rows = rows_of(gpt(h, layers, a), preset("a100", t * p), s, 1024.0, Candidates.of([one]))
            words = f"{name} {kind}{' sp' if sp else ''}"
            found.append(Anchor(words, float(rows.row["saved_bytes"][0]), published))
    return found


def state_anchors() -> list[Anchor]:
    """Bytes of weights, gradients and optimizer on a rank of the first stage."""
    found = []
    for name, (h, layers, a, b, t, p, v) in KORTHIKANTI.items():
        for d, zero in ((1, 0), (8, 1)):
            one = Strategy(tp=t, pp=p, dp=d, virtual=v, microbatch=b, zero=zero)
            rows = rows_of(gpt(h, layers, a), preset("a100", t * p * d), 2048, 1024.0, Candidates.of([one]))
            memory = memory_of(rows)
            held = float((memory.parameters + memory.gradients + memory.optimizer)[0])
            params = (12 * layers * h**2 * (1 + 13 / (12 * h)) / p + (51200 + 2048) * h) / t
            found.append(Anchor(f"{name} d={d}", held, params * (18 if d == 1 else 6 + 12 / d)))
    return found


def peaks(cases: Sequence[Case], rows: Priced) -> list[Anchor]:
    """Measured peaks of what an allocator reserved."""
    chosen = [i for i, case in enumerate(cases) if case.memory_bytes]
    return [Anchor(cases[i].name, rows.reported(i), cases[i].memory_bytes) for i in chosen]


def called_out_of_memory(cases: Sequence[Case], rows: Priced) -> list[str]:
    """Rows that ran, and that the memory model would have refused."""
    found = []
    for index, case in enumerate(cases):
        need, capacity = rows.needed(index), case.cluster.capacity_bytes
        if case.whole_step and need > capacity:
            found.append(f"{case.name}: {need / 2**30:.1f} of {capacity / 2**30:.1f} GiB")
    return found


@dataclass(frozen=True)
class Collective:
    """One timing of NCCL's all-reduce."""

    ranks: int
    num_bytes: float
    measured: float
    predicted: float


def collectives(folder: Path, constants: Constants) -> tuple[list[Collective], list[Skipped]]:
    """Every row of the NCCL table, on nodes of 8 A100 with one 200 Gb/s port each."""
    path = folder / f"{NCCL_TABLE}.csv"
    if not path.exists():
        return [], []
    found, skipped = [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                ranks, size = int(row["n_gpus"]), float(row["bytes"])
                cluster = preset("a100", max(8, ranks))
                inside = min(ranks, 8)
                groups = groups_of(cluster, np.array([[float(inside), ranks / inside]]))
                kind = np.full(1, float(PRICED_KINDS.index("all_reduce")))
                seconds = collective_seconds(kind, np.full(1, size), groups, constants)
                found.append(Collective(ranks, size, float(row["time_us"]) * 1e-6, float(seconds[0])))
            except (LookupError, ValueError, TypeError, ArithmeticError) as error:
                skipped.append(Skipped(NCCL_TABLE, f"line {line}", f"{type(error).__name__}: {error}"))
    return found, skipped
