"""Part A: one block, forward and backward, on two ranks (tp), every row in one interleaved run.

Each size gets fresh ranks, so no compiled row sees another size's cache. A row that can't be
built or run says why and is left out of the timing; a row whose loss or gradients differ from
the single device's by more than 1e-4 relative is timed but marked wrong (float32 with sums in
another order differs by about 1e-6; 1e-4 catches a missing collective).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters  # checked on torch 2.13

from benchmarks.ranks import run_ranks
from benchmarks.record import Sample, Spread, Table, across_ranks, interleave
from benchmarks.shard import counting
from benchmarks.shard.block import BlockSize, make_input
from benchmarks.shard.dtensor import finish_gradients
from benchmarks.shard.rows import HAND_WRITTEN, HAND_WRITTEN_INDUCTOR, ROWS, Row, Running, single

NUM_RANKS = 2
TOLERANCE = 1e-4


@dataclasses.dataclass
class Finding:
    """What one rank learned about one row."""

    failure: str | None = None
    error: float | None = None
    traffic: counting.Traffic | None = None
    unfinished: counting.Traffic | None = None
    samples: list[Sample] = dataclasses.field(default_factory=list)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted value."""
    difference = (found.detach() - wanted.detach()).abs().max()
    return float(difference / wanted.detach().abs().max().clamp_min(1e-30))


def largest_error(running: Running, size: BlockSize) -> float:
    """Loss, parameter gradients and input gradient against one device."""
    reference = single(size)
    x_wanted, x_found = make_input(size), make_input(size)
    errors = [relative_error(running.step(x_found), reference.step(x_wanted))]
    if running.autograd:
        assert x_found.grad is not None and x_wanted.grad is not None
        errors.append(relative_error(x_found.grad, x_wanted.grad))
    found, wanted = running.gradients(), reference.gradients()
    if found.keys() != wanted.keys():
        raise RuntimeError(f"gradient names differ: {sorted(found.keys() ^ wanted.keys())}")
    errors += [relative_error(found[name], wanted[name]) for name in wanted]
    return max(errors)


def agree(failure: str | None) -> str | None:
    """The first failure of any rank: all ranks go on with a row, or none."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next((text for text in failures if text), None)


def prepare(row: Row, size: BlockSize) -> tuple[Running | None, Finding]:
    """Build a row, warm it up, check it, count its collectives."""
    finding = Finding()
    running = None
    counters.clear()
    try:
        running = row.build(size)
        x_BSD = make_input(size)
        for _ in range(3):
            running.step(x_BSD)
        if row.compiled:
            require_no_fallback()
        if row.checked:
            finding.error = largest_error(running, size)
        num_ranks, parameters = dist.get_world_size(), running.parameters
        finding.traffic = counting.traffic(lambda: running.step(x_BSD), num_ranks)
        finding.unfinished = counting.dispatched(lambda: finish_gradients(parameters), num_ranks)
    except Exception as error:  # a row may fail in any way; the table says how
        first_line = (str(error).strip() or "no message").splitlines()[0]
        finding.failure = f"{type(error).__name__}: {first_line}"[:160]
    finding.failure = agree(finding.failure)
    return (None if finding.failure else running), finding


def require_no_fallback() -> None:
    """Raise unless dynamo compiled something and broke no graph."""
    if counters["graph_break"]:
        raise RuntimeError(f"fell back to eager: {dict(counters['graph_break'])}")
    if not counters["stats"]["unique_graphs"]:
        raise RuntimeError("nothing was compiled")


def measure_rows(
    names: Sequence[str], size: BlockSize, rounds: int, steps: int
) -> dict[str, Finding]:
    """Runs on every rank."""
    findings, steppers = {}, {}
    x_BSD = make_input(size)
    for row in ROWS:
        if row.name not in names:
            continue
        running, findings[row.name] = prepare(row, size)
        if running is not None:
            steppers[row.name] = functools.partial(running.step, x_BSD)
    graphs_before = counters["stats"]["unique_graphs"]
    samples = interleave(steppers, rounds, steps, before=dist.barrier)
    if counters["graph_break"] or counters["stats"]["unique_graphs"] != graphs_before:
        raise RuntimeError("a compiled row was compiled again or fell back while being timed")
    for name, taken in samples.items():
        findings[name].samples = taken
    return findings


def note(finding: Finding) -> str:
    """Collectives by kind, and those that the step leaves to whoever uses its gradients."""
    assert finding.traffic is not None
    left = finding.unfinished
    if left is None or not left.total:
        return finding.traffic.text()
    return f"{finding.traffic.text()}; left to the optimizer: {left.text()}, {left.wire_bytes} bytes"


def block_table(
    names: Sequence[str], size: BlockSize, rounds: int, steps: int
) -> tuple[Table, dict[str, object]]:
    """Launch ranks, measure, and lay the findings out; also the raw samples."""
    by_rank = run_ranks(NUM_RANKS, measure_rows, names, size, rounds, steps)
    merged = across_ranks([{n: f.samples for n, f in found.items()} for found in by_rank])
    cpu = {n: Spread.of([s.cpu_seconds for s in taken]) for n, taken in merged.items() if taken}
    wall = {n: Spread.of([s.wall_seconds for s in taken]) for n, taken in merged.items() if taken}
    carried = {row.name: row.transport for row in ROWS}
    rows: list[tuple[Any, ...]] = []
    for name, finding in by_rank[0].items():
        if finding.failure is not None:
            rows.append((name, carried[name], *[None] * 6, f"failed: {finding.failure}"))
            continue
        assert finding.traffic is not None
        versus = HAND_WRITTEN_INDUCTOR if "Inductor" in name else HAND_WRITTEN
        ratio = cpu[name].median / cpu[versus].median if versus in cpu else None
        wrong = finding.error is not None and not finding.error <= TOLERANCE
        rows.append(
            (
                name,
                carried[name],
                cpu[name].text(1e3),
                wall[name].text(1e3),
                None if ratio is None else round(ratio, 2),
                finding.traffic.total,
                finding.traffic.wire_bytes,
                finding.error,
                "WRONG RESULT" if wrong else note(finding),
            )
        )
    title = f"One block, {size.name}, batch {size.batch}, heads {size.num_heads}, "
    title += f"feed-forward {size.feed_forward}, float32, tp{NUM_RANKS}"
    columns = (
        "program",
        "transport",
        "CPU ms",
        "wall ms",
        "CPU vs hand-written",
        "collectives",
        "bytes sent",
        "max rel. error",
        "note",
    )
    notes = (
        f"{rounds} interleaved rounds of {steps} steps; median (quartiles); CPU: all threads of a "
        "rank, mean of ranks; wall: the slower rank; per step, forward + backward",
        "one compute thread a rank (gloo has its own); transport own: shared memory between ranks of one "
        "machine, which hyperparallel takes by itself",
        "Inductor rows are compared with hand-written + Inductor, all others with hand-written",
        "the local half-block computes half of the result and is not checked",
        "left to the optimizer: collectives, neither counted nor timed, that bring gradients to the layouts "
        "of their parameters, where a backward ends with sums pending or other cuts",
    )
    raw = {name: [dataclasses.astuple(s) for s in taken] for name, taken in merged.items()}
    return Table(title, columns, tuple(rows), notes), {size.name: raw}
