"""Would a planner that trusts the model have chosen well? Regret and rank correlation over vTrain's groups.

A group holds the measured runs of one model on one number of devices. Runs of different batch sizes are
compared by seconds for each sample. Regret: how much slower the run that the model ranks first is than the
fastest of the group. Tau: Kendall's tau-b between predicted and measured order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.leaderboard.case import Array, Case


@dataclass(frozen=True)
class Choice:
    """Means over `groups` groups of at least two runs. tau: over groups of at least three."""

    groups: int
    regret: float
    worst: float
    tau: float
    pooled_tau: float
    """Over all pairs within groups."""


def kendall(first: Array, second: Array) -> tuple[float, float, float]:
    """(concordant minus discordant pairs, untied pairs of each) of two orders; tau-b is the first over the
    root of the product of the others.

    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    (1.0, 3.0, 3.0)
    """
    rows, columns = np.triu_indices(len(first), 1)
    a, b = np.sign(first[rows] - first[columns]), np.sign(second[rows] - second[columns])
    return float((a * b).sum()), float((a != 0).sum()), float((b != 0).sum())


def choice(cases: Sequence[Case], predicted: Array, by_batch: bool = False) -> Choice | None:
    """None where no group has two runs. by_batch: only runs of one batch size are compared."""
    groups: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        if case.group:
            groups.setdefault(case.group + (f" b{case.batch}" if by_batch else ""), []).append(index)
    regrets, taus, pooled = [], [], np.zeros(3)
    for members in groups.values():
        if len(members) < 2:
            continue
        share = np.array([1.0 / cases[i].batch for i in members])
        measured = np.array([cases[i].seconds for i in members]) * share
        expected = predicted[members] * share
        regrets.append(measured[int(expected.argmin())] / measured.min() - 1)
        found = np.array(kendall(expected, measured))
        pooled += found
        if len(members) > 2 and found[1] * found[2] > 0:
            taus.append(found[0] / np.sqrt(found[1] * found[2]))
    if not regrets:
        return None
    return Choice(
        len(regrets),
        float(np.mean(regrets)),
        float(np.max(regrets)),
        float(np.mean(taus)) if taus else 1.0,
        float(pooled[0] / np.sqrt(max(pooled[1] * pooled[2], 1.0))),
    )
