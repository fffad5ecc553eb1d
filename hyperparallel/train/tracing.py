"""A sharded step that writes what one of its calls did when, as a trace file.

Calls 6 to 10 are traced and the one of median length is written: by then programs are built and the allocator
has seen what a step needs (the first few calls are up to half longer), and a single step may be the one that
meets a pause of the machine. A run that is shorter leaves the trace of an earlier call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from hyperparallel.runtime.comm.collectives import all_reduce_start, wait
from hyperparallel.runtime.module.step import TrainStep
from hyperparallel.runtime.module.tracing import gathered, traced_step
from hyperparallel.simulate.timeline import Timeline
from hyperparallel.simulate.trace import write_trace
from hyperparallel.train.steps import ShardedStep

WINDOW = range(6, 11)
"""Calls of which one stays in the file."""
WRITTEN = (1, 3, WINDOW[0], WINDOW[-1])
"""Calls after which the file is written, each time over what is there."""


class TracedSteps(ShardedStep):
    """Writes one of the calls that it traced; every rank must make one.

    path: of the file, which rank 0 writes. notes: what stands in it beside the spans.
    """

    def __init__(self, train_step: TrainStep, path: Path, notes: Mapping[str, str]) -> None:
        super().__init__(train_step)
        self.path, self.notes, self.calls = path, notes, 0
        self.traced: dict[int, Timeline] = {}

    def step(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        self.calls += 1
        if self.calls not in WRITTEN and self.calls not in WINDOW:
            return super().step(batch)
        if self.calls not in WINDOW[1:]:
            self.traced = {}
        result, self.traced[self.calls] = traced_step(self.train_step, batch)
        if self.calls in WRITTEN:
            self._write()
        return asdict(result)

    def _write(self) -> None:
        here, calls = self.train_step.here, list(self.traced)
        seconds = torch.tensor([one.step_seconds for one in self.traced.values()], device=here.device)
        seconds = wait(all_reduce_start(seconds, "max", here.mesh_group))  # all ranks choose the same call
        chosen = calls[int(seconds.argsort()[len(calls) // 2])]
        among = f" of {calls[0]} to {calls[-1]}, the median" if len(calls) > 1 else ""
        facts = {**self.notes, "call": f"{chosen}{among}"}
        whole = gathered(self.traced[chosen], here, f"trace/{self.calls}", facts)
        if whole is not None:
            write_trace(whole, self.path)
