"""From a job to a planning: search in closed form, simulate the best, split their layers, rank again.

`plan_job` is what `hyperparallel plan MODEL --cluster NAME` calls; a report needs nothing but its `Planning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyperparallel.errors import ClusterError, PlanError
from hyperparallel.plan.cost.constants import Constants
from hyperparallel.plan.search.advice import too_large
from hyperparallel.plan.search.balance import LEAST_GAIN, balanced
from hyperparallel.plan.search.find import OBJECTIVES, Objective, find, rank_key
from hyperparallel.plan.search.job import Job
from hyperparallel.plan.search.prices import Prices
from hyperparallel.plan.search.pricing import Prediction, Table
from hyperparallel.plan.search.reasons import Reason, loses, reasons
from hyperparallel.plan.search.space import EVERYTHING, Limits
from hyperparallel.plan.search.stages import Split
from hyperparallel.plan.search.step import Simulated, num_actions, simulated_step
from hyperparallel.plan.search.traffic import Link, link_loads
from hyperparallel.plan.search.validity import warnings
from hyperparallel.plan.strategy import Candidates

SIMULATED, LEAST_SIMULATED = 6, 2
MOST_ACTIONS = 10000
"""So many of the best in closed form are simulated: at most 6, and where pipelines are deep, from the third
on no more than this many actions in all."""


@dataclass(frozen=True)
class Choice:
    """A strategy with what is expected of it; simulated: where it was among the best."""

    prediction: Prediction
    simulated: Simulated | None = None

    @property
    def seconds(self) -> float:
        """Of a step: simulated where it was, else in closed form."""
        return self.simulated.seconds if self.simulated else self.prediction.seconds

    @property
    def split(self) -> Split | None:
        """Uneven stages, where they gain."""
        return self.simulated.split if self.simulated else None


@dataclass(frozen=True)
class Planning:
    """What came out. choices: best first. considered, fitting: strategies in all, and those with enough
    memory. reasons: why the first is as it is. against: what the second loses. links: load of the fabric.
    scaled: for the objective "cost", (devices, seconds of a step) of every size that was tried. uneven: what
    the integer program gained, or ""."""

    job: Job
    objective: Objective
    choices: tuple[Choice, ...]
    considered: int
    fitting: int
    reasons: tuple[Reason, ...]
    against: str
    warnings: tuple[str, ...]
    links: tuple[Link, ...]
    scaled: tuple[tuple[int, float], ...] = ()
    uneven: str = ""

    @property
    def best(self) -> Choice:
        return self.choices[0]


def plan_job(
    job: Job,
    objective: Objective = "time",
    limits: Limits = EVERYTHING,
    constants: Constants | None = None,
    top: int = 5,
) -> Planning:
    """The best plans of a job.

    Raises `PlanError` where nothing fits (with what would make it fit), and where no strategy serves the
    number of devices.
    """
    if objective not in OBJECTIVES:
        raise PlanError("--objective", objective, ", ".join(OBJECTIVES))
    used = constants or Constants()
    scaled: tuple[tuple[int, float], ...] = ()
    if objective == "cost":
        job, scaled = cheapest(job, limits, used)
    found = find(job, objective, limits, used, keep=max(top, SIMULATED) + 1)
    if not found.best:
        raise too_large(job, limits, used)
    prices = {p.strategy: Prices(job, p.strategy, used) for p in worth_simulating(job, found.best)}
    choices = [_simulated(job, p, prices.get(p.strategy)) for p in found.best]
    choices.sort(key=lambda c: _key(c, objective))
    choices = choices[:top]
    first, uneven = choices[0], ""
    choices[0] = _with_uneven_stages(job, first, objective, prices.get(first.prediction.strategy))
    if choices[0] is not first:
        split = choices[0].split
        gain = 1.0 - choices[0].seconds / first.seconds
        uneven = f"{split.words() if split else ''} a stage instead of equal parts: {gain:.1%} faster"
    best = choices[0].prediction
    table = Table(job, Candidates.of([best.strategy]), used)
    return Planning(
        job,
        objective,
        tuple(choices),
        found.considered,
        found.fitting,
        tuple(reasons(job, best, objective, limits, used)),
        loses(first.prediction, choices[1].prediction) if len(choices) > 1 else "",
        tuple(warnings(job, best)),
        tuple(link_loads(job.cluster, best.strategy, table.rows)),
        scaled,
        uneven,
    )


def worth_simulating(job: Job, best: Sequence[Prediction]) -> list[Prediction]:
    """The first few, fewer where they are large."""
    chosen: list[Prediction] = []
    actions = 0
    for prediction in best[:SIMULATED]:
        actions += num_actions(job, prediction.strategy)
        if len(chosen) >= LEAST_SIMULATED and actions > MOST_ACTIONS:
            break
        chosen.append(prediction)
    return chosen


def _simulated(job: Job, prediction: Prediction, prices: Prices | None) -> Choice:
    if prices is None:
        return Choice(prediction)
    return Choice(prediction, simulated_step(job, prediction.strategy, prices=prices))


def _key(choice: Choice, objective: Objective) -> tuple[float, ...]:
    return (
        choice.simulated is None,
        *rank_key(replace(choice.prediction, seconds=choice.seconds), objective),
    )


def _with_uneven_stages(job: Job, choice: Choice, objective: Objective, prices: Prices | None) -> Choice:
    """With uneven stages or mixed recomputation, where the simulation agrees that it gains."""
    strategy = choice.prediction.strategy
    plain = strategy.pp == 1 and strategy.recompute == "none"
    if plain or prices is None or objective == "memory":
        return choice
    split = balanced(prices)
    if split is None:
        return choice
    simulated = simulated_step(job, strategy, split, prices=prices)
    better = simulated.seconds < choice.seconds * (1.0 - LEAST_GAIN)
    return Choice(choice.prediction, simulated) if better else choice


def cheapest(job: Job, limits: Limits, constants: Constants) -> tuple[Job, tuple[tuple[int, float], ...]]:
    """The job on as many devices (halved again and again) as need the fewest device seconds for its step."""
    tried: list[tuple[float, Job, float]] = []
    devices = job.devices
    while devices >= 1:
        try:
            smaller = replace(job, cluster=job.cluster.resized(devices))
            found = find(smaller, "time", limits, constants, keep=1)
        except (ClusterError, PlanError):
            found, smaller = None, job
        if found is not None and found.best:
            tried.append((devices * found.best[0].seconds, smaller, found.best[0].seconds))
        elif tried:
            break
        if devices % 2:
            break
        devices //= 2
    if not tried:
        raise too_large(job, limits, constants)
    _, best, _ = min(tried, key=lambda t: t[0])
    return best, tuple((other.devices, seconds) for _, other, seconds in tried)
