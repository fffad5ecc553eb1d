"""What each pipeline stage holds: its layers in order, and how each of them is recomputed.

A stage is a chunk: with v chunks on each of p ranks there are p * v of them, on the ranks that the schedule
says (`Strategy.homes`). Extra predictions count as layers at the end. By default layers are dealt out in
equal parts, the last stage takes what is left, and all are recomputed alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.strategy import Strategy

ACTIONS = ("none", "light", "alternate", "full", "offload")
"""What is done with a layer's saved activations: kept; what costs little, half or all recomputed; or moved to
host memory until the backward."""

ACTION_WORDS = {"none": "kept", "offload": "offloaded"}


@dataclass(frozen=True)
class Split:
    """Layers of every stage as (kind, action): kind is a position in `Model.kinds`, action in `ACTIONS`."""

    stages: tuple[tuple[tuple[int, str], ...], ...]

    def counts(self) -> tuple[int, ...]:
        """Layers of every stage."""
        return tuple(len(stage) for stage in self.stages)

    def actions(self) -> dict[str, int]:
        """Layers under each action, in the order of `ACTIONS`."""
        every = [action for stage in self.stages for _, action in stage]
        names = sorted(set(every), key=lambda a: ACTIONS.index(a) if a in ACTIONS else len(ACTIONS))
        return {name: every.count(name) for name in names}

    def words(self) -> str:
        """Runs of stages with as many layers and the same recomputation.

        >>> Split((((0, "none"),), ((0, "none"), (0, "full")))).words()
        '1, 2 (1 full) layers'
        """
        said: list[str] = []
        for stage in self.stages:
            again = [f"{sum(r == x for _, r in stage)} {x}" for x in ACTIONS[1:]]
            again = [text for text in again if not text.startswith("0 ")]
            said.append(f"{len(stage)}" + (f" ({', '.join(again)})" if again else ""))
        runs: list[tuple[str, int]] = []
        for text in said:
            runs[-1:] = [(text, runs[-1][1] + 1)] if runs and runs[-1][0] == text else [*runs[-1:], (text, 1)]
        return ", ".join(text if n == 1 else f"{n} x {text}" for text, n in runs) + " layers"


def plan_words(strategy: Strategy, split: Split) -> str:
    """A strategy whose layers are not all treated alike: how many are kept, computed again or offloaded.

    >>> split = Split((((0, "none"), (0, "offload")), ((0, "offload"),)))
    >>> plan_words(Strategy(pp=2, recompute="alternate"), split)
    'pp2 mb1 zero1, layers 1 kept 2 offloaded, uneven stages'
    """
    counts = split.actions()
    alike = list(counts) == [strategy.recompute]
    said = [strategy.words() if alike else replace(strategy, recompute="none").words()]
    if not alike:
        named = [f"{count} {ACTION_WORDS.get(action, action)}" for action, count in counts.items()]
        said.append(f"layers {' '.join(named)}")
    said += ["uneven stages"] if len(set(split.counts())) > 1 else []
    return ", ".join(said)


def layer_kinds(job: PlanningJob) -> list[int]:
    """The kind of every layer, first to last: a position in `Model.kinds`, then in `mtp_layers`."""
    model = job.model
    place = {layer: i for i, (layer, _) in enumerate(model.kinds)}
    extra = range(len(place), len(place) + len(model.mtp_layers if model.mtp else ()))
    return [place[layer] for layer in model.each_layer()] + list(extra) * model.mtp


def even_split(job: PlanningJob, strategy: Strategy) -> Split:
    """Equal parts, all recomputed as the strategy says."""
    kinds, parts = layer_kinds(job), strategy.pp * strategy.virtual
    each = ceil(len(kinds) / parts)
    return Split(
        tuple(
            tuple((kind, strategy.recompute) for kind in kinds[i * each : (i + 1) * each])
            for i in range(parts)
        )
    )
