"""Where the seconds and the bytes of a simulated step go, in the parts that the closed form has.

    seconds   of all microbatches, a mean over pipeline ranks: what is computed, what is exposed of messages,
              of copies to host memory, of gradients, the update; the bubble is what is left of the step, so
              that the parts add up to it. Without a pipeline what is left are messages that wait for others.
    bytes     of the fullest rank at its peak: states in proportion to its layers, activations of what is in
              flight, working memory of the action that runs; they add up to the peak of the timeline

Left out: memory that copies to the host hold while they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyperparallel.mpmd import Action, Schedule
from hyperparallel.planner.step.layer_costs import LayerPrices, Pass
from hyperparallel.planner.step.stages import Split, even_split


@dataclass(frozen=True)
class PeakMemory:
    """Memory of the rank that needs most. parts: of its peak on the device, in bytes; host_bytes: the most
    that any rank keeps in host memory."""

    parts: Mapping[str, float]
    host_bytes: float

    @property
    def peak_bytes(self) -> float:
        return sum(self.parts.values())


def time_parts(
    prices: LayerPrices, split: Split, microbatches: int, seconds: float, gradients: float, update: float
) -> dict[str, float]:
    """Parts of a step of so many seconds; gradients: seconds exposed of them, update: of the optimizer."""
    whole = prices.head().plus(prices.front())
    for stage in split.stages:
        for kind, action in stage:
            whole = whole.plus(layer_pass(prices, kind, action))
    mean = whole.scaled(microbatches / prices.strategy.pp)
    parts = {
        "compute": mean.compute,
        "exposed_tensor": mean.tensor + mean.gather,
        "exposed_experts": mean.experts,
        "bubble": 0.0,
        "exposed_gradients": gradients,
        "optimizer": update,
    }
    if mean.copy > 0.0:
        parts["exposed_host"] = mean.copy
    parts["bubble" if prices.strategy.pp > 1 else "exposed_tensor"] += seconds - sum(parts.values())
    return parts


def layer_pass(prices: LayerPrices, kind: int, action: str) -> Pass:
    """Seconds of a layer and microbatch, forward and backward with what is computed again."""
    return prices.forward(kind, action).plus(prices.backward(kind, action)).plus(prices.again(kind, action))


def state_shares(prices: LayerPrices, split: Split) -> list[float]:
    """Bytes of each rank's states by those of a rank with a mean number of layers; 1 for all in equal parts,
    as in the closed form."""
    whole, _ = prices.static_bytes()
    states, pp = whole - prices.overhead_bytes(), prices.strategy.pp
    counts = [0] * pp
    for rank, stage in zip(prices.strategy.homes, split.stages, strict=True):
        counts[rank] += len(stage)
    # The closed form gives every rank the mean of states, so that equal parts must come out as 1 here too,
    # though the last of them may be shorter.
    if split.counts() == even_split(prices.job, prices.strategy).counts() or not states:
        return [1.0] * pp
    each, mean = prices.layer_state_bytes() / states, sum(counts) / pp
    return [max(1.0 + (count - mean) * each, 0.0) for count in counts]


def saved_bytes(prices: LayerPrices, split: Split, stage: int) -> float:
    """What a stage keeps of a microbatch from its forward to its backward, with what stages exchange."""
    held = sum(prices.saved_bytes(action) for _, action in split.stages[stage])
    return held + edge_bytes(prices, stage)


def edge_bytes(prices: LayerPrices, stage: int) -> float:
    """The same beside its layers: tensors between stages, and encoders in the first."""
    s = prices.strategy
    held = 2.0 * float(prices.row["boundary_bytes"]) / s.virtual if s.pp > 1 else 0.0
    return held + (prices.front_saved_bytes() if stage == 0 else 0.0)


def peak_memory(prices: LayerPrices, split: Split, order: Schedule, shares: Sequence[float]) -> PeakMemory:
    """Memory at the peak of the rank that needs most, its actions done in this order; shares: of states."""
    table = prices.memory
    every = range(len(split.stages))
    saved = [saved_bytes(prices, split, stage) for stage in every]
    moved = [prices.saved_bytes("none") * sum(a == "offload" for _, a in split.stages[s]) for s in every]
    working = [prices.working_bytes(stage == every[-1]) for stage in every]
    nothing = [0.0] * len(saved)
    at = prices.own_row
    found: list[PeakMemory] = []
    for share, actions in zip(shares, order, strict=True):
        activations, at_work = most_held(actions, saved, working)
        away, _ = most_held(actions, moved, nothing)
        parts = {
            "parameters": share * float(table.parameters[at]),
            "gradients": share * float(table.gradients[at]),
            "optimizer": share * float(table.optimizer[at]),
            "activations": activations,
            "working": at_work,
            "overhead": prices.overhead_bytes(),
        }
        found.append(PeakMemory(parts, share * float(table.host[at]) + away))
    fullest = max(found, key=lambda one: one.peak_bytes)
    return PeakMemory(fullest.parts, max(one.host_bytes for one in found))


def most_held(
    actions: Sequence[Action], saved: Sequence[float], working: Sequence[float]
) -> tuple[float, float]:
    """(saved, working) bytes where a rank's actions in order hold most; both are given by stage.

    >>> from hyperparallel.mpmd import schedule
    >>> most_held(schedule("1f1b", 2, 4)[0], [3.0, 3.0], [1.0, 1.0])
    (6.0, 1.0)
    """
    kept, most = 0.0, (0.0, 0.0)
    for action in actions:
        kept += saved[action.stage] if action.kind == "F" else 0.0
        used = working[action.stage] if action.kind in "BI" else 0.0
        most = max(most, (kept, used), key=sum)
        kept -= saved[action.stage] if action.kind in "BW" else 0.0
    return most


