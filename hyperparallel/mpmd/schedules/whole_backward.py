"""Schedules whose backward is one action: GPipe, and 1F1B with one chunk a rank or several (interleaved).

Idle seconds of a step: (p - 1)(F + B) for gpipe and 1f1b, (p - 1)(F + B) / v where v chunks are interleaved.
Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B and interleaved, in the order of Megatron-LM).
"""

from __future__ import annotations

from typing import Any

from hyperparallel.errors import PlanError
from hyperparallel.mpmd.action import Action, Schedule
from hyperparallel.mpmd.schedules.record import PipelineSchedule, RankSeconds, smaller


def gpipe(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """All forwards, then all backwards, last first."""
    order = range(microbatches)
    return tuple(
        (*(Action("F", rank, m) for m in order), *(Action("B", rank, m) for m in reversed(order)))
        for rank in range(stages)
    )


def one_forward_one_backward(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Just enough forwards to keep the last stage busy, then one forward, one backward.

    With several chunks a rank, stage c * stages + rank is chunk c of a rank, and microbatches go through a
    chunk in groups of `stages`, so that they must divide into such groups.
    """
    if virtual > 1 and microbatches % stages:
        allowed = f"a multiple of the {stages} stages, as groups of that size go round"
        near = max(1, round(microbatches / stages)) * stages
        raise PlanError("microbatches", microbatches, allowed, str(near))
    # Groups as long as the pipeline: when the last of a group has left a rank's chunk, the first is back for
    # its next one.
    group = stages if virtual > 1 else microbatches
    ranks = []
    for rank in range(stages):
        forwards, backwards = [], []
        for first in range(0, microbatches, group):
            for chunk in range(virtual):
                for m in range(first, first + group):
                    forwards.append(Action("F", chunk * stages + rank, m))
                    # Gradients come back through the chunks in reverse.
                    backwards.append(Action("B", (virtual - 1 - chunk) * stages + rank, m))
        ahead = _ahead(stages, virtual, rank)
        ranks.append(_alternating(forwards, backwards, min(len(forwards), ahead)))
    return tuple(ranks)


def _ahead(stages: Any, virtual: Any, rank: Any) -> Any:
    """Forwards of a rank before its first backward may come, but one.

    A chunk's backward needs the round trip through all later ranks. With several chunks twice as many are
    ahead (2 a later rank, not 1): the gradient of the last chunk comes back through every rank while a
    forward of another chunk stands between any two of its steps.
    """
    twice = 1 + (virtual > 1)
    return twice * (stages - 1 - rank) + (virtual - 1) * stages


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one of each in turn, then the backwards that are left."""
    order = forwards[:ahead]
    # The forward first: the stage behind waits for it, while the backward's gradient is still under way.
    for i, forward in enumerate(forwards[ahead:]):
        order += (forward, backwards[i])
    return (*order, *backwards[len(forwards) - ahead :])


def _idle(stages: Any, microbatches: Any, virtual: Any, seconds: RankSeconds) -> Any:
    return (stages - 1) / virtual * seconds.work


def _held(stages: Any, microbatches: Any, virtual: Any, rank: Any) -> Any:
    return smaller(microbatches * virtual, _ahead(stages, virtual, rank) + 1)


def _held_first(stages: Any, microbatches: Any, virtual: Any) -> Any:
    """The warm-up runs through all chunks; a second round is in the first before its gradients are."""
    return smaller(microbatches, (1 + (virtual > 1)) * stages)


GPIPE = PipelineSchedule(
    "gpipe",
    "all forwards, then all backwards",
    gpipe,
    _idle,
    _idle,
    held=lambda stages, microbatches, virtual, rank: microbatches,
    held_first=lambda stages, microbatches, virtual: microbatches,
    searched=False,  # takes as long as 1f1b, in more memory
)
ONE_F_ONE_B = PipelineSchedule(
    "1f1b",
    "one forward, one backward; over several chunks a rank, interleaved",
    one_forward_one_backward,
    _idle,
    _idle,
    _held,
    _held_first,
    chunks=lambda virtual: virtual >= 1,
    usual_chunks=(1, 2, 4),
    rounds=True,
    pairs=lambda virtual: virtual > 1,
)
