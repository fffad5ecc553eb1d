"""A small integer-program builder over HiGHS.

Columns are added with a cost and an optional integrality; rows are sparse equalities or inequalities.
Solved by HiGHS (Huangfu and Hall 2018) in one thread and with its fixed seed, so that every rank that solves
the same program to its end gets the same answer. One that stops at its time limit may not: what ranks decided
is compared before a program runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

LARGEST_COST = 1e4
"""Costs are scaled to this, for tolerances are absolute (1e-7) and costs span eleven powers of ten."""


class _Quiet(highspy.Highs):  # type: ignore[misc, unused-ignore]
    """HiGHS without callbacks: enabling them prints a banner before output can be switched off (1.16)."""

    def __init__(self) -> None:
        super(highspy.Highs, self).__init__()
        self.setOptionValue("output_flag", False)


@dataclass
class IntegerProgram:
    """Minimise cost @ x subject to rows, 0 <= x <= most (1 unless said); some columns integral."""

    costs: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    row_starts: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, integral: bool = False, most: float = 1.0) -> int:
        """Add a variable in [0, most]; returns its index."""
        self.costs.append(cost)
        self.integral.append(integral)
        self.most.append(most)
        return len(self.costs) - 1

    def row(
        self, plus: Sequence[int], minus: Sequence[int] = (), lower: float = 0.0, upper: float = 0.0
    ) -> None:
        """Add lower <= sum(plus) - sum(minus) <= upper (repeated indices add up)."""
        weights: dict[int, float] = {}
        for index in plus:
            weights[index] = weights.get(index, 0.0) + 1.0
        for index in minus:
            weights[index] = weights.get(index, 0.0) - 1.0
        self.weighted(weights, lower, upper)

    def weighted(self, weights: Mapping[int, float], lower: float = 0.0, upper: float = 0.0) -> None:
        """Add lower <= sum of weight * variable <= upper."""
        # Rows one behind another, each beginning where `row_starts` says: HiGHS takes them so.
        self.indices.extend(weights)
        self.coefficients.extend(weights.values())
        self.row_starts.append(len(self.indices))
        self.lower.append(lower)
        self.upper.append(upper)

    def at_least(self, plus: Sequence[int], minus: Sequence[int], bound: float = 0.0) -> None:
        """Add sum(plus) - sum(minus) >= bound."""
        self.row(plus, minus, bound, math.inf)

    def solve(self, seconds: float, gap: float = 1e-8) -> tuple[list[float], float, float]:
        """The solution, its cost, and a lower bound on the cost of any solution.

        gap: by how much, relative to its cost, the solution may be worse than the best. Small, as one latency
        is a small part of a long step; relaxations are near integral, so that costs little time.
        Raises RuntimeError when the program has no solution or the time ran out before one was found.
        """
        highs = _Quiet()
        # Which of equal optima several threads meet first is chance, and each rank solves for itself.
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("time_limit", seconds)
        highs.setOptionValue("mip_rel_gap", gap)
        # Steps cost microseconds: below the solver's absolute tolerance all of them would be equally good.
        scale = LARGEST_COST / max(max(self.costs, default=1.0), 1e-30)
        highs.passModel(self._model(scale))
        highs.run()
        info = highs.getInfo()
        # 2: feasible. At the time limit the best so far will do, and the bound says how far off it may be.
        if info.primal_solution_status != 2:
            raise RuntimeError(f"no strategy found: {highs.getModelStatus()}")
        # Without integral columns there is no search tree to give a bound: the optimum is its own.
        bound = info.mip_dual_bound if any(self.integral) else info.objective_function_value
        values = list(highs.getSolution().col_value)
        return values, info.objective_function_value / scale, bound / scale

    def _model(self, scale: float) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        num_columns, num_rows = len(self.costs), len(self.lower)
        lp.num_col_, lp.num_row_ = num_columns, num_rows
        lp.col_cost_ = np.asarray(self.costs) * scale
        lp.col_lower_ = np.zeros(num_columns)
        lp.col_upper_ = np.asarray(self.most)
        lp.row_lower_ = np.asarray(self.lower)
        lp.row_upper_ = np.asarray(self.upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.asarray(self.row_starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.asarray(self.indices, dtype=np.int32)
        lp.a_matrix_.value_ = np.asarray(self.coefficients)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[i] for i in self.integral]
        return lp
