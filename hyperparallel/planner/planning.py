"""From a job to a planning: search in closed form, simulate the best, split their layers, rank again.

`plan_job` is what `hyperparallel plan MODEL --cluster NAME` calls; a report needs nothing but its `Planning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hyperparallel.errors import ClusterError, PlanError
from hyperparallel.plan.wording import seconds_words
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.runnable import missing
from hyperparallel.planner.search.advice import too_large
from hyperparallel.planner.search.reasons import Reason, loses, reasons
from hyperparallel.planner.search.search import OBJECTIVES, Objective, rank_key, search
from hyperparallel.planner.search.space import EVERYTHING, Limits
from hyperparallel.planner.search.table import Prediction, StrategyTable
from hyperparallel.planner.search.validity import warnings
from hyperparallel.planner.step.balance import LEAST_GAIN, balanced
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.link_load import Link, link_loads
from hyperparallel.planner.step.simulated_step import Simulated, num_actions, simulated_step
from hyperparallel.planner.step.stages import Split, plan_words
from hyperparallel.planner.strategy import Candidates, Strategy

SIMULATED, LEAST_SIMULATED = 6, 2
MOST_ACTIONS_SIMULATED = 10000
"""So many of the best in closed form are simulated: 6 or as many as are asked for, and where pipelines are
deep, from the third on no more than this many actions in all."""

FINISHED = 2
"""So many of the plans that come out on top are simulated and refined in any case, as they get there: the
best and the one that it is compared with."""

FAR_APART = 0.1
"""Share of the closed form by which the simulation may differ without a note."""


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy with what is expected of it. prediction: in closed form, of equal parts; simulated: where it
    was among the best, with its layers refined where that gains; even_seconds: simulated in equal parts."""

    prediction: Prediction
    simulated: Simulated | None = None
    even_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a step: simulated where it was, else in closed form."""
        return self.simulated.seconds if self.simulated else self.prediction.seconds

    @property
    def split(self) -> Split | None:
        """Layers by stage and what is done with each, where that is no longer alike for all."""
        return self.simulated.split if self.simulated and self.simulated.refined else None

    @property
    def expected(self) -> Prediction:
        """What is shown of it, all of one plan: the simulated step and its parts, memory of the refined
        layers (in closed form, which is that of the simulation, where nothing was refined)."""
        one = self.simulated
        if one is None:
            return self.prediction
        shown = replace(self.prediction, seconds=one.seconds, parts=one.parts)
        return replace(shown, memory=one.held.parts, host_bytes=one.held.host_bytes) if one.refined else shown

    @property
    def words(self) -> str:
        """Its name in a report: other plans have other names."""
        split = self.split
        return plan_words(self.prediction.strategy, split) if split else self.prediction.strategy.words()

    @property
    def missing(self) -> list[str]:
        """What of it the executor cannot run yet."""
        found = missing(self.prediction.strategy)
        offloads = self.split is not None and "offload" in self.split.actions()
        return [*found, "offload"] if offloads and "offload" not in found else found

    @property
    def uneven(self) -> str:
        """What refining its layers gains; empty where nothing was refined."""
        if self.split is None:
            return ""
        gain = 1.0 - self.seconds / self.even_seconds
        more = (self.expected.peak_bytes - self.prediction.peak_bytes) / 1e9
        recompute = self.prediction.strategy.recompute
        alike = f"{recompute} recomputation" if recompute != "none" else "all kept"
        said = f"{self.split.words()} a stage instead of equal parts, {alike}"
        return f"{said}: {gain:.1%} faster, {more:+.1f} GB"


@dataclass(frozen=True)
class Planning:
    """What came out. choices: best first. considered, fitting: strategies in all, and those with enough
    memory. reasons: why the first is as it is. against: what the second loses. links: load of the fabric.
    scaled: for the objective "cost", (devices, seconds of a step) of every size that was tried. uneven: what
    the integer program gained, or ""."""

    job: PlanningJob
    objective: Objective
    choices: tuple[PlannedStrategy, ...]
    considered: int
    fitting: int
    reasons: tuple[Reason, ...]
    against: str
    warnings: tuple[str, ...]
    links: tuple[Link, ...]
    scaled: tuple[tuple[int, float], ...] = ()
    uneven: str = ""

    @property
    def best(self) -> PlannedStrategy:
        return self.choices[0]


def plan_job(
    job: PlanningJob,
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
        job, scaled = fewest_device_seconds(job, limits, used)
    found = search(job, objective, limits, used, keep=max(top, SIMULATED) + 1)
    if not found.best:
        raise too_large(job, limits, used)
    choices = ranked(job, found.best, objective, used, top)
    first = choices[0]
    best = first.prediction
    shown = {c.prediction.strategy: c.expected for c in choices if c.simulated}
    table = StrategyTable(job, Candidates.of([best.strategy]), used)
    return Planning(
        job,
        objective,
        tuple(choices),
        found.considered,
        found.fitting,
        tuple(reasons(job, best, objective, limits, used, found=found.evaluated, shown=shown)),
        against(first, choices[1], objective) if len(choices) > 1 else "",
        (*warnings(job, first.expected), *apart(choices)),
        tuple(link_loads(job.cluster, best.strategy, table.rows)),
        scaled,
        first.uneven,
    )


def ranked(
    job: PlanningJob, best: Sequence[Prediction], objective: Objective, constants: Constants, top: int
) -> list[PlannedStrategy]:
    """Best first by the number that is shown of each."""
    early = {p.strategy for p in worth_simulating(job, best[: max(top, SIMULATED)])}
    choices = [PlannedStrategy(p) for p in best]
    prices = {s: LayerPrices(job, s, constants) for s in early}
    for i, choice in enumerate(choices):
        if choice.prediction.strategy in early:
            choices[i] = _simulated(job, choice, prices[choice.prediction.strategy])
    finished: set[Strategy] = set()
    while True:
        choices.sort(key=lambda c: rank_key(c.expected, objective))
        first = choices[: min(FINISHED, top)]
        todo = [i for i, c in enumerate(first) if c.prediction.strategy not in finished]
        if not todo:
            return choices[:top]
        choice = choices[todo[0]]
        strategy = choice.prediction.strategy
        finished.add(strategy)
        own = prices.get(strategy) or LayerPrices(job, strategy, constants)
        choice = choice if choice.simulated else _simulated(job, choice, own)
        choices[todo[0]] = choice if objective == "memory" else _refined(job, choice, own)


def worth_simulating(job: PlanningJob, best: Sequence[Prediction]) -> list[Prediction]:
    """The first few, fewer where they are large."""
    chosen: list[Prediction] = []
    actions = 0
    for prediction in best:
        actions += num_actions(job, prediction.strategy)
        if len(chosen) >= LEAST_SIMULATED and actions > MOST_ACTIONS_SIMULATED:
            break
        chosen.append(prediction)
    return chosen


def _simulated(job: PlanningJob, choice: PlannedStrategy, prices: LayerPrices) -> PlannedStrategy:
    step = simulated_step(job, choice.prediction.strategy, prices=prices)
    return PlannedStrategy(choice.prediction, step, step.seconds)


def _refined(job: PlanningJob, choice: PlannedStrategy, prices: LayerPrices) -> PlannedStrategy:
    """With uneven stages or mixed recomputation, where the simulation agrees that it gains."""
    strategy = choice.prediction.strategy
    if strategy.pp == 1 and strategy.recompute == "none":
        return choice
    split = balanced(prices)
    if split is None:
        return choice
    step = simulated_step(job, strategy, split, prices=prices)
    better = step.seconds < choice.seconds * (1.0 - LEAST_GAIN)
    return replace(choice, simulated=step) if better else choice


def against(first: PlannedStrategy, second: PlannedStrategy, objective: Objective) -> str:
    """What the runner-up loses, in the numbers that are shown of both."""
    return f"{second.words}: {loses(first.expected, second.expected, objective)}"


def apart(choices: Sequence[PlannedStrategy]) -> Iterator[str]:
    """Plans of which the simulation and the closed form say different things."""
    for choice in choices:
        closed = choice.prediction.seconds
        if choice.simulated and abs(choice.even_seconds / closed - 1.0) > FAR_APART:
            yield (
                f"{choice.words}: simulated {choice.even_seconds / closed - 1.0:+.0%} from the closed form "
                f"({seconds_words(closed)}), by which plans were searched and the reasons are told"
            )


def fewest_device_seconds(
    job: PlanningJob, limits: Limits, constants: Constants
) -> tuple[PlanningJob, tuple[tuple[int, float], ...]]:
    """The job on as many devices (halved again and again) as need the fewest device seconds for its step."""
    tried: list[tuple[float, PlanningJob, float]] = []
    devices = job.devices
    while devices >= 1:
        try:
            smaller = replace(job, cluster=job.cluster.resized(devices))
            found = search(smaller, "time", limits, constants, keep=1)
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
