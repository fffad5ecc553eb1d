"""A sharded step that writes what one of its calls did when, as a trace file.

The sixth call is traced: by then programs are built and the allocator has seen what a step needs (the first
few calls are up to half longer). A run that is shorter leaves the trace of an earlier call. Not every call is
traced: while rank 0 writes one the others would begin the next, and wait for it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from hyperparallel.plan.simulate.trace import write_trace
from hyperparallel.runtime.step import TrainStep
from hyperparallel.runtime.tracing import gathered, traced_step
from hyperparallel.train.steps import ShardedStep

TRACED_CALLS = (1, 3, 6)


class TracedSteps(ShardedStep):
    """Writes some calls, each over the one before; every rank must make one.

    path: of the file, which rank 0 writes. notes: what stands in it beside the spans.
    """

    def __init__(self, train_step: TrainStep, path: Path, notes: Mapping[str, str]) -> None:
        super().__init__(train_step)
        self.path, self.notes, self.calls = path, notes, 0

    def step(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        self.calls += 1
        if self.calls not in TRACED_CALLS:
            return super().step(batch)
        here = self.train_step.here
        result, own = traced_step(self.train_step, batch)
        facts = {**self.notes, "call": str(self.calls)}
        whole = gathered(own, here.rank, here.world_size, f"trace/{self.calls}", facts)
        if whole is not None:
            write_trace(whole, self.path)
        return {"loss": result.loss, "grad_norm": result.grad_norm, "comm_seconds": result.comm_seconds}
