"""One step of a real run as a timeline, in the same words as the simulator's.

For one step the programs run in a second form that notes the moment behind every node; the plain form is
untouched, so a step that is not traced pays nothing. On CUDA moments are events on the current stream: a
collective lasts until that stream has waited for it. What stands around the programs is told by the
optimizer's hooks: "clip" is what lies between the last program and the update.

Leaves out the cutting of batches, which shows as a gap, and memory. Ranks of one host share a clock; those
of other hosts are aligned at a barrier before the step.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store, _get_default_store  # private, checked on torch 2.13

from hyperparallel.graph.predict.instructions import unsized_instructions
from hyperparallel.runtime.exec.compiled import Compiled
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.micro_batches import split_batch
from hyperparallel.runtime.module.step import StepResult, TrainStep
from hyperparallel.simulate.rank_tasks import measured_spans
from hyperparallel.simulate.timeline import COMPUTE, Span, Timeline
from hyperparallel.simulate.trace import from_chrome_trace, to_chrome_trace

Moments = list[Any]


class _Clock:
    """Moments on this rank's device, as seconds of `perf_counter` once all of them are noted."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
        self.origin, self.first = perf_counter(), self.now()

    def now(self) -> Any:
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        """Only after the device has come to all moments."""
        if not self.cuda:
            return float(moment)
        return self.origin + float(self.first.elapsed_time(moment)) / 1e3


def traced_step(step: TrainStep, batch: Any) -> tuple[StepResult, Timeline]:
    """Do one step of `TrainStep` and tell what this rank did when, in seconds of its own clock."""
    for micro in split_batch(batch, step.accumulate):
        step._program(micro)  # built now, not while the clock runs
    clock = _Clock(step.here.device)
    runs: list[tuple[Compiled, Moments]] = []
    update: Moments = []
    with ExitStack() as stack:
        for compiled in _programs(step):
            stack.enter_context(_noting(compiled, clock, runs))
        for hook in (step.optimizer.register_step_pre_hook, step.optimizer.register_step_post_hook):
            handle = hook(lambda *_: update.append(clock.now()))
            stack.callback(handle.remove)
        step.here.barrier()  # all have compiled: what is traced begins together
        result = step.step(batch)
    if clock.cuda:
        torch.cuda.synchronize()
    return result, Timeline(tuple(_spans(step, clock, runs, update)), source="measured")


def _programs(step: TrainStep) -> Iterator[Compiled]:
    for program in step._programs.values():
        yield from program.compiled_programs


@contextmanager
def _noting(compiled: Compiled, clock: _Clock, runs: list[tuple[Compiled, Moments]]) -> Iterator[None]:
    """Inside, every run of the joint stage is put in `runs` with its moments."""
    length = len(compiled.nodes("joint")) + 1

    def mark() -> None:
        # A new run: of another program, or of this one once all its moments are noted.
        if not runs or runs[-1][0] is not compiled or len(runs[-1][1]) == length:
            runs.append((compiled, []))
        runs[-1][1].append(clock.now())

    with compiled.marked("joint", mark):
        yield


def _spans(
    step: TrainStep, clock: _Clock, runs: list[tuple[Compiled, Moments]], update: Moments
) -> Iterator[Span]:
    rank, last = step.here.rank, clock.origin
    for i, (compiled, moments) in enumerate(runs):
        seconds = [clock.seconds(moment) for moment in moments]
        suffix = f" #{i + 1}" if len(runs) > 1 else ""
        yield from measured_spans(rank, unsized_instructions(compiled.nodes("joint")), seconds, suffix)
        last = seconds[-1]
    if len(update) == 2:
        begin, end = (clock.seconds(moment) for moment in update)
        if step.clip is not None:
            yield Span("clip", rank, COMPUTE, "clip", last, begin)
        yield Span("update", rank, COMPUTE, "update", begin, end)


def gathered(
    timeline: Timeline, here: Here, key: str, facts: Mapping[str, str] | None = None
) -> Timeline | None:
    """The timelines of a mesh's ranks as one that begins at 0, on its first rank; None on others.

    All ranks of the mesh must call it.

    key: names this gathering among those of the job.
    """
    own = dict(facts or {})
    here.barrier()
    clock = (socket.gethostname(), perf_counter())
    if here.mesh.size == 1:
        return _merged([timeline], [clock], own)
    store: Store = _get_default_store()
    if not here.is_first:
        store.set(f"{key}/{here.rank}", json.dumps([clock, to_chrome_trace(timeline)]))
    here.barrier()  # so that no `get` waits: it would name no rank
    if not here.is_first:
        return None
    parts, places = [timeline], [clock]
    for other in here.mesh.ranks[1:]:
        place, text = json.loads(store.get(f"{key}/{other}"))
        parts.append(from_chrome_trace(text))
        places.append(tuple(place))
        store.delete_key(f"{key}/{other}")
    return _merged(parts, places, own)


def _merged(parts: list[Timeline], places: list[tuple[str, float]], facts: Mapping[str, str]) -> Timeline:
    """One timeline from 0 on; places: each part's host, and its clock when all ranks left a barrier."""
    # The first to leave the barrier is nearest to the moment when all had come.
    origin: dict[str, float] = {}
    for host, seconds in places:
        origin[host] = min(seconds, origin.get(host, seconds))
    spans = [
        span._replace(begin=span.begin - origin[host], end=span.end - origin[host])
        for part, (host, _) in zip(parts, places, strict=True)
        for span in part.spans
    ]
    begin = min((span.begin for span in spans), default=0.0)
    moved = tuple(span._replace(begin=span.begin - begin, end=span.end - begin) for span in spans)
    return Timeline(moved, source="measured", facts=facts)
