"""Scores: errors per source and pooled, raw and calibrated, in sample, cross-validated, by source left out.

An error is |predicted / measured - 1| of the seconds of a step. Raw: with the constants alone. Calibrated:
times one factor per source, which comes from ONE row: of the rows that were fitted, that with the median
ratio; of a source that was not fitted, the square root of its first row's ratio, and that row is not scored
(a row scatters as much around its source as sources do around one, so half of what it says is believed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.leaderboard.case import Array, Case, Priced, priced, seconds_of
from benchmarks.leaderboard.fit import Mask, calibration, fit
from hyperparallel.planner.cost.constants import Constants

FOLDS = 5
BELIEVED = 0.5


@dataclass(frozen=True)
class Errors:
    """Of `count` rows: mean, median and 90th percentile of the absolute error, and the median error with its
    sign; all as shares."""

    count: int
    mape: float
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Errors | None:
        """None without rows."""
        known = np.isfinite(predicted)
        if not known.any():
            return None
        signed = predicted[known] / measured[known] - 1
        size = np.abs(signed)
        return cls(
            int(known.sum()),
            float(size.mean()),
            float(np.median(size)),
            float(np.quantile(size, 0.9)),
            float(np.median(signed)),
        )

    def plain(self) -> dict[str, float]:
        """For JSON."""
        return {key: round(value, 5) for key, value in asdict(self).items()}


def calibrated(cases: Sequence[Case], predicted: Array, factors: Mapping[str, float]) -> Array:
    """Predictions times the factor of their source; of a source without one its first row gives it, and
    becomes NaN, for it is not scored."""
    own = dict(factors)
    result = np.array(predicted)
    for index, case in enumerate(cases):
        if case.source not in own:
            own[case.source] = (case.seconds / predicted[index]) ** BELIEVED
            result[index] = np.nan
        else:
            result[index] *= own[case.source]
    return result


def by_source(cases: Sequence[Case], predicted: Array) -> dict[str, Errors]:
    """Errors of every source, in order, then of every table and of "all"."""
    measured = seconds_of(cases)
    keys = [[case.source for case in cases], [f"table {case.table}" for case in cases], ["all"] * len(cases)]
    result: dict[str, Errors] = {}
    for labels in keys:
        for label in dict.fromkeys(labels):
            chosen = np.array([one == label for one in labels])
            found = Errors.of(predicted[chosen], measured[chosen])
            if found is not None:
                result[label] = found
    return result


def folds(cases: Sequence[Case], count: int = FOLDS, seed: int = 0) -> list[Mask]:
    """Masks of held-out rows, shuffled and spread evenly within every source."""
    order = np.random.default_rng(seed).permutation(len(cases))
    seen: dict[str, int] = {}
    fold = np.zeros(len(cases), int)
    for index in order:
        source = cases[index].source
        fold[index] = (seen.get(source, hash_of(source)) + 1) % count
        seen[source] = fold[index]
    return [fold == one for one in range(count) if (fold == one).any() and (fold != one).any()]


def hash_of(text: str) -> int:
    """A number that is the same in every process."""
    return sum(text.encode())


def held_out(
    cases: Sequence[Case], rows: Priced, masks: Sequence[Mask], start: Constants
) -> tuple[Array, Array]:
    """(raw, calibrated) predictions of every row by constants and factors fitted without its mask."""
    raw, fixed = np.full(len(cases), np.nan), np.full(len(cases), np.nan)
    measured = seconds_of(cases)
    for mask in masks:
        constants = fit(cases, rows, ~mask, start)
        predicted = rows.seconds(constants)
        factors = calibration(cases, measured / predicted, ~mask)
        raw[mask] = predicted[mask]
        chosen = np.flatnonzero(mask)
        fixed[mask] = calibrated([cases[i] for i in chosen.tolist()], predicted[mask], factors)
    return raw, fixed


def family(source: str) -> str:
    """Sources that are left out together: releases of one table, papers of one machine and software."""
    for name in ("Megatron-Bridge", "llm-foundry", "Narayanan21", "Korthikanti22", "MegaScale24", "vtrain"):
        if source.startswith(name):
            return name
    return source


def families(cases: Sequence[Case]) -> list[Mask]:
    """One mask for each family of sources."""
    names = [family(case.source) for case in cases]
    return [np.array([name == one for name in names]) for one in dict.fromkeys(names)]


@dataclass
class Score:
    """What was found for a set of rows under one set of constants."""

    cases: Sequence[Case]
    rows: Priced
    predicted: Array
    factors: Mapping[str, float]
    fixed: Array

    @classmethod
    def of(cls, cases: Sequence[Case], constants: Constants, factors: Mapping[str, float]) -> Score:
        """Price the cases."""
        rows = priced(cases)
        predicted = rows.seconds(constants)
        return cls(cases, rows, predicted, factors, calibrated(cases, predicted, factors))
