"""Two timelines of the same step side by side: how far a prediction is off, and in which kind of action.

Differences are (predicted - measured) / measured. Per kind the seconds are sums of spans, a mean over
ranks. Orders are compared on the ranks and streams that both have: the same program must do the same
actions in the same order, whatever their times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hyperparallel.simulate.timeline import Timeline

Unit = Literal["seconds", "share", "bytes"]


@dataclass(frozen=True)
class Row:
    """One number of both timelines."""

    name: str
    unit: Unit
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; NaN where nothing was measured.

        >>> Row("step", "seconds", 1.1, 1.0).error.__round__(3)
        0.1
        """
        return (self.predicted - self.measured) / self.measured if self.measured else math.nan


@dataclass(frozen=True)
class Comparison:
    """The step as a whole, its kinds of actions (the largest first), and the order of actions.

    disorder: "" where both have the same order, else where they first differ.
    """

    summary: tuple[Row, ...]
    kinds: tuple[Row, ...]
    disorder: str

    @property
    def step_error(self) -> float:
        """The relative error of the step's seconds."""
        return self.summary[0].error


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Both timelines' numbers; the first row is the step's seconds."""
    summary = [
        Row("step", "seconds", predicted.step_seconds, measured.step_seconds),
        Row("busy", "share", predicted.busy_share, measured.busy_share),
        Row("exposed communication", "share", predicted.exposed_share, measured.exposed_share),
        Row("bubble", "share", predicted.bubble_share, measured.bubble_share),
        Row("masking ratio", "share", predicted.masking_ratio, measured.masking_ratio),
        Row("communication", "seconds", predicted.communication_seconds, measured.communication_seconds),
    ]
    if predicted.memory and measured.memory:
        summary.append(Row("peak memory", "bytes", predicted.peak_bytes(), measured.peak_bytes()))
    ours, theirs = predicted.seconds_by_kind(), measured.seconds_by_kind()
    kinds = [
        Row(kind, "seconds", ours.get(kind, 0.0), theirs.get(kind, 0.0))
        for kind in sorted({*ours, *theirs}, key=lambda k: (-max(ours.get(k, 0.0), theirs.get(k, 0.0)), k))
    ]
    return Comparison(tuple(summary), tuple(kinds), _disorder(predicted, measured))


def _disorder(predicted: Timeline, measured: Timeline) -> str:
    ranks = [rank for rank in predicted.ranks if rank in measured.ranks]
    if not ranks:
        return f"no rank in common: {predicted.ranks} and {measured.ranks}"
    for rank in ranks:
        ours, theirs = predicted.order(rank), measured.order(rank)
        for stream in sorted({*ours, *theirs}):
            found = _first_difference(ours.get(stream, ()), theirs.get(stream, ()))
            if found:
                return f"rank {rank}, stream {stream}: {found}"
    return ""


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"action {i + 1} is {a!r} predicted and {b!r} measured"
    if len(ours) != len(theirs):
        return f"{len(ours)} actions predicted and {len(theirs)} measured"
    return ""
