"""Fits the cost model's constants to measured steps: robust least squares on logarithms, with priors.

    minimise  sum_i w_i rho(ln predicted_i - ln measured_i)  +  tau^2 sum_c ((ln c - ln prior_c) / sigma_c)^2

rho is the pseudo-Huber loss (quadratic below `DELTA`, linear above), so unphysical rows pull little; w_i =
1 / sqrt(rows of the source), so that a table of 700 rows counts 26 times, not 700 times, as much as a single
row. Solved by Levenberg-Marquardt with iteratively reweighted residuals (Triggs et al. 2000, section 4.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.leaderboard.case import Array, Case, rows_of_cases, seconds_of
from hyperparallel.plan.cost.constants import PRIORS, Constants
from hyperparallel.plan.cost.price import step_seconds
from hyperparallel.plan.cost.rows import Rows

DELTA = 0.05
PRIOR_WEIGHT = 0.1
"""Spread (in logarithms) that a row is believed to have; scales priors against rows."""


def fit(cases: Sequence[Case], start: Constants | None = None, steps: int = 60) -> Constants:
    """The constants that fit the cases best."""
    rows, measured = rows_of_cases(cases), np.log(seconds_of(cases))
    counts = Counter(case.source for case in cases)
    weights = np.array([1 / np.sqrt(counts[case.source]) for case in cases])
    prior = np.log([p.value for p in PRIORS.values()])
    tightness = (PRIOR_WEIGHT / np.array([p.sigma for p in PRIORS.values()])) ** 2

    def residuals(logs: Array) -> Array:
        return np.log(_measured_part(cases, rows, Constants.of_logs(logs))) - measured

    def loss(logs: Array, rest: Array) -> float:
        robust = 2 * DELTA**2 * (np.sqrt(1 + (rest / DELTA) ** 2) - 1)
        return float(weights @ robust + tightness @ (logs - prior) ** 2)

    logs = (start or Constants()).logs()
    rest = residuals(logs)
    best, damping = loss(logs, rest), 1e-2
    for _ in range(steps):
        width = 1e-4
        moved = [residuals(logs + width * unit) for unit in np.eye(len(logs))]
        slopes = np.stack([(m - rest) / width for m in moved], axis=1)
        pull = weights / np.sqrt(1 + (rest / DELTA) ** 2)
        hessian = slopes.T @ (slopes * pull[:, None]) + np.diag(tightness)
        gradient = slopes.T @ (pull * rest) + tightness * (logs - prior)
        before = best
        while damping < 1e8:
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            tried = logs - step
            with np.errstate(all="ignore"):
                after = residuals(tried)
                value = loss(tried, after)
            if np.isfinite(value) and value < best:
                logs, rest, best, damping = tried, after, value, damping / 5
                break
            damping *= 4
        if before - best < 1e-7 * before:
            break
    return Constants.of_logs(logs)


def predict(cases: Sequence[Case], constants: Constants, rows: Rows | None = None) -> Array:
    """Seconds of each case."""
    return _measured_part(cases, rows or rows_of_cases(cases), constants)


def _measured_part(cases: Sequence[Case], rows: Rows, constants: Constants) -> Array:
    step = step_seconds(rows, constants)
    whole = np.array([case.whole_step for case in cases])
    return np.where(whole, step.seconds, step.compute + step.exposed_tensor)


def calibration(cases: Sequence[Case], constants: Constants) -> Mapping[str, float]:
    """A factor per source from ONE of its rows: the row whose ratio is the median of the source's."""
    predicted = predict(cases, constants)
    ratios: dict[str, list[float]] = {}
    for case, seconds in zip(cases, predicted, strict=True):
        ratios.setdefault(case.source, []).append(case.seconds / seconds)
    return {source: sorted(values)[(len(values) - 1) // 2] for source, values in ratios.items()}
