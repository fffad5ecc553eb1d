"""Part D: host microseconds per graph op that are the runtime's own, kernels excluded.

One rank, so no bytes move (DTensor still calls its collectives). A step of the small block is
recorded op by op (a dispatch mode sees each plain-tensor op with its arguments); each recorded
call is then timed alone, spelled the quickest way, on its recorded arguments. Overhead per op is
(CPU of a whole step - sum of the calls alone) / number of recorded ops. A call alone still pays
the dispatcher, as any program must; what is left is program, autograd, wrappers, bookkeeping.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # checked on torch 2.13

from benchmarks.ranks import run_ranks
from benchmarks.record import Spread, Table, interleave
from benchmarks.shard import rows as block_rows
from benchmarks.shard.block import SMALL, make_input

NAMES = (
    block_rows.LOCAL,
    block_rows.PARALLELIZE,
    block_rows.ALL_DTENSORS,
    block_rows.OURS,
    block_rows.OURS_WHOLE_STEP,
)
ROWS = {row.name: row for row in block_rows.ROWS if row.name in NAMES}
STEPS = 40


class Recorder(TorchDispatchMode):
    """Keeps every op that reaches plain tensors; DTensors are left to take themselves apart."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "aten":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def quickest_spelling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's direct Python binding where it has one: the same kernel, a microsecond sooner.

    Timing every row's ops by the quickest way to call them leaves no saving of ours uncounted.
    """
    name = func._schema.name.removeprefix("aten::")
    binding = getattr(torch, name, None) or getattr(torch.Tensor, name, None) or func
    try:
        binding(*args, **kwargs)
    except (TypeError, RuntimeError):
        return func
    return binding


def alone_seconds(call: tuple[Any, tuple[Any, ...], dict[str, Any]], repeats: int = 60) -> float:
    """CPU seconds of one call by itself: the best of five short loops."""
    func, args, kwargs = call
    best = float("inf")
    with torch.no_grad():
        func = quickest_spelling(func, args, kwargs)
        for _ in range(5):
            start = time.process_time()
            for _ in range(repeats):
                func(*args, **kwargs)
            best = min(best, (time.process_time() - start) / repeats)
    return best


def measure_overhead(names: Sequence[str], rounds: int) -> dict[str, tuple[int, float, Any]]:
    """Runs on the one rank: per row the number of ops, seconds alone, and step samples."""
    found: dict[str, tuple[int, float, Any]] = {}
    steppers: dict[str, Callable[[], object]] = {}
    x_BSD = make_input(SMALL)
    failures: dict[str, str] = {}
    for name in names:
        try:
            running = ROWS[name].build(SMALL)
            for _ in range(5):
                running.step(x_BSD)
            with Recorder() as recorder:
                running.step(x_BSD)
        except Exception as error:  # a row may fail in any way; the table says how
            first_line = (str(error).strip() or "no message").splitlines()[0]
            failures[name] = f"failed: {type(error).__name__}: {first_line}"[:160]
            continue
        alone = sum(alone_seconds(call) for call in recorder.calls)
        found[name] = (len(recorder.calls), alone, None)
        steppers[name] = functools.partial(running.step, x_BSD)
    for name, samples in interleave(steppers, rounds, STEPS).items():
        found[name] = (*found[name][:2], samples)
    return found | {name: (0, 0.0, text) for name, text in failures.items()}


def overhead_table(names: Sequence[str], rounds: int) -> tuple[Table, dict[str, Any]]:
    """One row per program."""
    found = run_ranks(1, measure_overhead, names, rounds)[0]
    rows: list[tuple[Any, ...]] = []
    raw: dict[str, Any] = {}
    for name, (num_ops, alone, samples) in found.items():
        if isinstance(samples, str):
            rows.append((name, None, None, None, None, samples))
            continue
        step = Spread.of([sample.cpu_seconds for sample in samples])
        own = Spread.of([(sample.cpu_seconds - alone) / num_ops for sample in samples])
        rows.append((name, num_ops, round(alone * 1e3, 3), step.text(1e3), own.text(1e6), ""))
        raw[name] = {"ops": num_ops, "alone_seconds": alone}
    columns = ("program", "ops", "ops alone, CPU ms", "step, CPU ms", "own us per op", "note")
    title = f"Host overhead per graph op, block {SMALL.name}, one rank"
    notes = (
        f"{rounds} interleaved rounds of {STEPS} steps; median (quartiles); "
        "own = (step - ops alone) / ops",
        "an op alone still pays PyTorch's dispatcher, as it would in any program",
    )
    return Table(title, columns, tuple(rows), notes), {"overhead": raw}
