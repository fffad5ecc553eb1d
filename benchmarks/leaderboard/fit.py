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
import numpy.typing as npt

from benchmarks.leaderboard.case import Array, Case, Priced, priced, seconds_of
from hyperparallel.planner.cost.constants import PRIORS, Constants

DELTA = 0.05
PRIOR_WEIGHT = 0.1
"""Spread (in logarithms) that a row is believed to have; scales priors against rows."""

Mask = npt.NDArray[np.bool_]


def fit(
    cases: Sequence[Case],
    rows: Priced | None = None,
    used: Mask | None = None,
    start: Constants | None = None,
    steps: int = 60,
) -> Constants:
    """The constants that fit the cases best (of those that `used` marks, where it is given)."""
    rows, measured = rows or priced(cases), np.log(seconds_of(cases))
    chosen = np.ones(len(cases), bool) if used is None else used
    counts = Counter(case.source for case, use in zip(cases, chosen, strict=True) if use)
    weights = chosen / np.sqrt([max(counts[case.source], 1) for case in cases])
    prior = np.log([p.value for p in PRIORS.values()])
    tightness = (PRIOR_WEIGHT / np.array([p.sigma for p in PRIORS.values()])) ** 2

    def residuals(logs: Array) -> Array:
        return np.log(rows.seconds(Constants.of_logs(logs))) - measured

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
        if before - best < 1e-6 * before:
            break
    return Constants.of_logs(logs)


def calibration(cases: Sequence[Case], ratios: Array, used: Mask | None = None) -> Mapping[str, float]:
    """A factor per source from ONE of its rows: that whose ratio (measured / predicted) is the median."""
    found: dict[str, list[float]] = {}
    for index, case in enumerate(cases):
        if used is None or used[index]:
            found.setdefault(case.source, []).append(float(ratios[index]))
    return {source: sorted(values)[(len(values) - 1) // 2] for source, values in found.items()}
