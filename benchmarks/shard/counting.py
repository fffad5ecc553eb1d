"""Counting a step's collectives and the bytes they put on the wire.

Peers are counted where all of them, eager or compiled, pass: the functional-collective ops that
the profiler sees being dispatched. hyperparallel may carry a collective by other means than those
ops, so its calls to the start functions of `runtime.collectives` are counted as well, by
watching Python calls; the larger count stands, so nothing it sends can hide.
Peers that post their collectives from C++ (DDP's buckets, FSDP2) pass below those ops, so whole training
steps are counted at the process group, where every program over gloo passes; bytes are not known there.
Bytes are what one rank must send for it: 2(n-1)/n of the tensor for an all-reduce, (n-1)/n of the
whole for gather, scatter and all-to-all (float32 throughout).
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

OPS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "permute_tensor": "permute",
}


POSTED = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one rank started in one step."""

    counts: Mapping[str, int]
    wire_bytes: int

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def text(self) -> str:
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))


def wire_bytes(kind: str, input_bytes: int, num_ranks: int) -> int:
    """Bytes one rank sends, given the bytes of its input.

    >>> wire_bytes("all_reduce", 100, 2), wire_bytes("all_gather", 100, 4)
    (100, 300)
    """
    if kind == "all_reduce":
        return 2 * (num_ranks - 1) * input_bytes // num_ranks
    if kind == "all_gather":
        return (num_ranks - 1) * input_bytes
    if kind in ("reduce_scatter", "all_to_all"):
        return (num_ranks - 1) * input_bytes // num_ranks
    return input_bytes


def dispatched(step: Callable[[], object], num_ranks: int) -> Traffic:
    """Functional collectives that `step` dispatches."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    counts: Counter[str] = Counter()
    total = 0
    for event in profiler.events() or ():
        space, _, op = event.name.partition("::")
        kind = OPS.get(op.rstrip("_")) if space == "_c10d_functional" else None
        if kind is None:
            continue
        counts[kind] += 1
        total += wire_bytes(kind, 4 * math.prod(event.input_shapes[0]), num_ranks)
    return Traffic(dict(counts), total)


def posted(step: Callable[[], object]) -> Traffic:
    """Collectives, and sends between two ranks, that `step` posts to process groups; without bytes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    parts = [event.name.partition("::") for event in profiler.events() or ()]
    kinds = [POSTED[op] for space, _, op in parts if space == "c10d" and op in POSTED]
    return Traffic(dict(Counter(kinds)), 0)


def started(step: Callable[[], object], num_ranks: int) -> Traffic:
    """Calls of hyperparallel's own start functions during `step`."""
    try:
        collectives = importlib.import_module("hyperparallel.runtime.comm.collectives")
    except ImportError:
        return Traffic({}, 0)
    kinds = {
        value.__code__: name.removesuffix("_start").removesuffix("_many")
        for name, value in vars(collectives).items()
        if name.endswith("_start") and hasattr(value, "__code__")
    }
    counts: Counter[str] = Counter()
    total = 0

    @torch.compiler.disable  # compiled programs would otherwise trace the watcher too
    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal total
        kind = kinds.get(frame.f_code) if event == "call" else None
        if kind is None or frame.f_locals["group"].size < 2:
            return
        counts[kind] += 1
        tensor = frame.f_locals[frame.f_code.co_varnames[0]]
        if isinstance(tensor, torch.Tensor):
            total += wire_bytes(kind, tensor.nbytes, num_ranks)

    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(None)
    return Traffic(dict(counts), total)


def of_training(step: Callable[[], object], num_ranks: int) -> Traffic:
    """What a training step makes one rank start, whoever starts it."""
    return max(started(step, num_ranks), posted(step), key=lambda found: found.total)


def traffic(step: Callable[[], object], num_ranks: int) -> Traffic:
    """Everything `step` makes one rank start, by whichever way shows more."""
    return max(
        (dispatched(step, num_ranks), started(step, num_ranks)), key=lambda found: found.total
    )
