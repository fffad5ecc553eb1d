"""Schedules that put off the gradients of weights until a rank would wait: zb-h1, zb-h2 and zb-v.

With F, I and W the seconds of a microbatch's forward, input and weight gradients on one rank, and p ranks, a
step that ends for all at once loses

    zb-h1    (p - 1) max(F, I, F + I - W)
    zb-h2    (p - 1) max(F, I - F, F + I - 2W)
    zb-v     (p - 1) max(F, I, 2(I - W)) / 2

If each rank may begin its next step while others finish (no norm or check over all of them), only F + I - W,
F + I - 2W and I - W are lost for each of the p - 1, where those are above 0. The papers have W no longer than
F and I; where F or W is longer than I, zb-v loses (p - 2)(max(F, W) - I) / 2 more (ours; F up to I + W).
Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241) and "Pipeline Parallelism with
Controllable Memory" (arXiv:2405.15362). A head (more work on the last stage) shortens what the others wait
for; by how much is ours, to the first order.
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


def zb_h1(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """1F1B's order; the later the stage, the longer its weight gradients wait, until all hold alike."""
    return _halved(stages, microbatches, ahead=1)


def zb_h2(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Forwards fill the first bubble too: none is left but that of starting later, for twice the memory."""
    return _halved(stages, microbatches, ahead=2)


def _halved(stages: int, microbatches: int, ahead: int) -> Schedule:
    """Per rank: forwards ahead, then F, I and the W that is due; what is left of W at the end."""
    ranks = []
    for rank in range(stages):
        # Forwards ahead fall with the rank as delayed weights rise, so that every rank holds p (zb-h2: 2p -
        # 1).
        first, delay = min(microbatches, ahead * (stages - 1 - rank)), ahead * rank
        order = [Action("F", rank, m) for m in range(first)]
        for m in range(microbatches):
            if first + m < microbatches:
                order.append(Action("F", rank, first + m))
            order.append(Action("I", rank, m))
            if m >= delay:
                order.append(Action("W", rank, m - delay))
        order += [Action("W", rank, m) for m in range(max(0, microbatches - delay), microbatches)]
        ranks.append(tuple(order))
    return tuple(ranks)


def zb_v(stages: int, microbatches: int, virtual: int = 2) -> Schedule:
    """Rank r holds stages r and 2p-1-r, so that the last stage stands on the first one's rank."""
    full = max(microbatches, 2 * stages - 1)  # the order is made for so many, then thinned
    ranks = []
    for rank in range(stages):
        line = RankLine((rank, 2 * stages - 1 - rank), microbatches)
        # Down the first arm until the first microbatch is back at this rank on the second.
        line.add("F0", 2 * (stages - rank) - 1)
        line.add("F1 F0", rank)
        # Backwards of the second arm begin, at rank 0 first; weights at once: no bubble is there yet to keep
        # them for.
        line.add("F1 I1 W1", stages - rank)
        # Steady: one of each kind and arm, forwards of the first as long as there are any.
        while line.taken["F1"] < line.taken["F0"] or line.taken["F0"] < full:
            line.add("F0", int(line.taken["F0"] < full))
            line.add("I0 W0 F1 I1 W1")
        # The drain: input gradients first, since ranks before wait for them; weights fill what is left.
        line.add("I0 I1", rank)
        line.add("I0 W0", stages - rank)
        line.add("W1", line.due(1))
        line.add("W0", line.due(0))
        ranks.append(tuple(line.order))
    return tuple(ranks)


def _idle_h1(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    """F + I - W ends with the weights' gradients that the last stage put off, so its head fills a third of
    itself for each of them; I is of stages that have time to spare while the head computes."""
    forward, input_grad, weight_grad, head = seconds
    put_off = (stages - 1) * (forward + input_grad - weight_grad) - stages * head / 3
    spare = (stages - 1) * input_grad - (microbatches - 1) * head
    return larger((stages - 1) * forward, spare, put_off)


def _idle_h2(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    """As in zb-h1, but the last stage puts off 2p - 1 weights' gradients where it was p; a stage is spared
    the input gradients that it does while others start."""
    forward, input_grad, weight_grad, head = seconds
    spare = (stages - 1) * (input_grad - forward) - (microbatches - 2 / 3) * head
    put_off = (stages - 1) * (forward + input_grad - 2.0 * weight_grad) - (2 * stages - 1) * head / 3
    return larger((stages - 1) * forward, spare, put_off)


def _idle_v(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    """The head stands on the first rank, which is then the fullest: others start later than it but have a
    head's time to spare in every microbatch. What stays is the last microbatch's way back through the V."""
    forward, input_grad, weight_grad, head = seconds
    before = stages - 1
    longer = larger(0.0, forward - input_grad, weight_grad - input_grad)
    starting = (before * forward + larger(0, stages - 2) * longer) / 2.0 - microbatches * head
    returning = before * larger(input_grad / 2.0, input_grad - weight_grad) - (microbatches - 2 / 3) * head
    draining = larger((stages - 2) * weight_grad, before * input_grad - stages * weight_grad) / 2.0 - head / 3
    return larger(0.0 * starting, starting, returning, draining)


def _idle_alone_h1(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    return (stages - 1) * (seconds.forward + seconds.input_grad - seconds.weight_grad)


def _idle_alone_h2(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    return (stages - 1) * (seconds.forward + seconds.input_grad - 2.0 * seconds.weight_grad)


def _idle_alone_v(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    return (stages - 1) * (seconds.input_grad - seconds.weight_grad)


def _held_h1(stages: Any, microbatches: Any, virtual: Any, rank: Any) -> Any:
    return smaller(microbatches, stages)


def _held_h2(stages: Any, microbatches: Any, virtual: Any, rank: Any) -> Any:
    return smaller(microbatches, 2 * stages - 1)


def _held_v(stages: Any, microbatches: Any, virtual: Any, rank: Any) -> Any:
    return smaller(2 * microbatches, 2 * stages)


def _held_first_v(stages: Any, microbatches: Any, virtual: Any) -> Any:
    return smaller(microbatches, 2 * stages)


ZB_H1 = PipelineSchedule(
    "zb-h1",
    "1f1b with the weights' gradients in the bubble",
    zb_h1,
    _idle_h1,
    _idle_alone_h1,
    _held_h1,
    held_first=lambda stages, microbatches, virtual: _held_h1(stages, microbatches, virtual, 0),
    splits=True,
    least_rounds=1,
)
ZB_H2 = PipelineSchedule(
    "zb-h2",
    "the same with up to 2p - 1 forwards ahead",
    zb_h2,
    _idle_h2,
    _idle_alone_h2,
    _held_h2,
    held_first=lambda stages, microbatches, virtual: _held_h2(stages, microbatches, virtual, 0),
    splits=True,
    least_rounds=2,
)
ZB_V = PipelineSchedule(
    "zb-v",
    "two chunks a rank, laid out in a V",
    zb_v,
    _idle_v,
    _idle_alone_v,
    _held_v,
    _held_first_v,
    home=v_shaped,
    chunks=two_chunks,
    usual_chunks=(2,),
    splits=True,
    least_rounds=2,
)
