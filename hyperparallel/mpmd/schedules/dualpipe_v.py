"""DualPipeV: forwards of one chunk run beside backwards of the other, in a V of two chunks a rank.

It is made for mixtures of experts: in the steady state every forward stands beside a backward of another
microbatch, so that the tokens of one travel while the other computes. A rank keeps 2p + 1 chunks. With F, I
and W the seconds of a microbatch on one of p ranks, following the order loses

    max((p - 1) F / 2, (p - 1)(F + I - W) / 2, (p - 1)(I - W / 2) - F / 2)

(ours). Where a forward and the backward beside it are one action that hands on both results at its end, as in
the authors' program, it is their (PP/2 - 1)(F&B + B - 3W): (p - 1)(F + 2I - W) / 2 for PP = 2p stages of half
a rank's layers, F&B = F + B and F = I. What runs beside computation is priced elsewhere.

Source: DeepSeek-V3 (arXiv:2412.19437, DualPipe) and its V form of half the ranks ("cut in half", Qi et al.
2025), in the steps that the authors published with it; torch's `ScheduleDualPipeV` follows the same.
"""

from __future__ import annotations

from typing import Any

from hyperparallel.mpmd.action import Action, Schedule
from hyperparallel.mpmd.schedules.line import RankLine
from hyperparallel.mpmd.schedules.record import (
    PipelineSchedule,
    RankSeconds,
    larger,
    smaller,
    two_chunks,
    v_shaped,
)


def dualpipe_v(stages: int, microbatches: int, virtual: int = 2) -> Schedule:
    """Rank r holds stages r and 2p-1-r; the order is made for at least 2p microbatches, then thinned."""
    full = max(microbatches, 2 * stages)
    return tuple(_rank(stages, full, microbatches, rank) for rank in range(stages))


def _rank(stages: int, full: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    line = RankLine((rank, 2 * stages - 1 - rank), microbatches)
    later = stages - 1 - rank
    line.add("F0", 2 * later)
    line.add("F0 F1", rank + 1)
    line.add("I1 W1 F1", later)  # weights at once: there is no bubble yet to keep them for
    line.add("F0 B1 F1 B0", full - 2 * stages + rank + 1)
    line.add("B1 F1 B0", later)
    # As gradients run out, the first half of what is left goes whole, then inputs first: their weights fill
    # the time in which the rank would wait for gradients of stages after it.
    whole = (rank + 1) // 2
    line.add("B1 B0", whole)
    if rank % 2 == 0:
        line.add("B1 I0")
    line.add("I1 I0", rank + 1 - whole - (rank % 2 == 0))
    line.add("W I0", later)
    line.add("W", rank + 1)
    return tuple(line.order)



def _idle(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    """The order, with F and B one after the other. A head stands on the first rank, as in zb-v: it spares the
    others almost a head in each microbatch, but not the way back of the last gradients."""
    forward, input_grad, weight_grad, head = seconds
    before = stages - 1
    starting = before * larger(forward, forward + input_grad - weight_grad) / 2.0
    starting = starting - (microbatches - 2 / 3) * head
    whole = before * (input_grad - weight_grad / 2.0) - forward / 2.0 - (microbatches - 4 / 3) * head
    passing = before * (input_grad - (forward + weight_grad) / 2.0) - forward / 2.0 - (stages - 1 / 3) * head
    draining = before * (input_grad - weight_grad) / 2.0
    return larger(0.0 * starting, starting, whole, passing, draining)


def _held(stages: Any, microbatches: Any, virtual: Any, rank: Any) -> Any:
    return smaller(2 * microbatches, 2 * stages + 1)


def _held_first(stages: Any, microbatches: Any, virtual: Any) -> Any:
    return smaller(microbatches, 2 * stages)


DUALPIPE_V = PipelineSchedule(
    "dualpipe-v",
    "a V whose forwards run beside backwards, for mixtures of experts",
    dualpipe_v,
    _idle,
    _idle,
    _held,
    _held_first,
    home=v_shaped,
    chunks=two_chunks,
    usual_chunks=(2,),
    splits=True,
    pairs=lambda virtual: virtual > 0,
    least_rounds=2,
)
