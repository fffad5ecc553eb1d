"""The named pipeline schedules, each as a function from sizes to every rank's list of actions.

| name        | order of a rank                                   | most in flight (chunks) |
| gpipe       | all forwards, then all backwards                  | m                       |
| 1f1b        | few forwards, then one forward, one backward      | p - rank                |
| interleaved | 1f1b over v chunks a rank                         | about vp                |
| zb-h1       | 1f1b with the weights' gradients in the bubble    | p                       |
| zb-h2       | the same with up to 2p - 1 forwards ahead         | 2p - 1                  |
| zb-v        | two chunks a rank, laid out in a V                | 2p (half as large)      |

for p ranks and m microbatches; their bubbles stand in `bubble.py`. Sources: Huang et al. 2019 (GPipe);
Narayanan et al. 2021 (1f1b and interleaved, in the order of Megatron-LM); Qi et al. 2024, "Zero Bubble
Pipeline Parallelism" and "Pipeline Parallelism with Controllable Memory" (zb).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from hyperparallel.errors import PlanError, nearest
from hyperparallel.mpmd.action import Action, Kind, Schedule


def gpipe(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """All forwards, then all backwards, last first."""
    order = range(microbatches)
    return tuple(
        (*(Action("F", rank, m) for m in order), *(Action("B", rank, m) for m in reversed(order)))
        for rank in range(stages)
    )


def one_forward_one_backward(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Just enough forwards to keep the last stage busy, then one forward, one backward."""
    ranks = []
    for rank in range(stages):
        forwards = [Action("F", rank, m) for m in range(microbatches)]
        backwards = [Action("B", rank, m) for m in range(microbatches)]
        ranks.append(_alternating(forwards, backwards, min(microbatches, stages - 1 - rank)))
    return tuple(ranks)


def interleaved(stages: int, microbatches: int, virtual: int = 2) -> Schedule:
    """1F1B over `virtual` chunks a rank: stage c * stages + rank is chunk c of a rank.

    Microbatches go through a chunk in groups of `stages`; microbatches must divide into such groups.
    """
    if microbatches % stages:
        allowed = f"a multiple of the {stages} stages, as groups of that size go round"
        near = max(1, round(microbatches / stages)) * stages
        raise PlanError("microbatches", microbatches, allowed, str(near))
    total = microbatches * virtual
    ranks = []
    for rank in range(stages):
        forwards, backwards = [], []
        for first in range(0, microbatches, stages):
            for chunk in range(virtual):
                for m in range(first, first + stages):
                    forwards.append(Action("F", chunk * stages + rank, m))
                    backwards.append(Action("B", (virtual - 1 - chunk) * stages + rank, m))
        ahead = 2 * (stages - 1 - rank) + (virtual - 1) * stages
        ranks.append(_alternating(forwards, backwards, min(total, ahead)))
    return tuple(ranks)


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one of each in turn, then the backwards that are left."""
    order = forwards[:ahead]
    for i, forward in enumerate(forwards[ahead:]):
        order += (forward, backwards[i])
    return (*order, *backwards[len(forwards) - ahead :])


def zb_h1(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """1F1B's order; the later the stage, the longer its weight gradients wait, until all hold alike."""
    return _halved(stages, microbatches, ahead=1)


def zb_h2(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Forwards fill the first bubble too: none is left but that of starting later, for twice the memory."""
    return _halved(stages, microbatches, ahead=2)


def _halved(stages: int, microbatches: int, ahead: int) -> Schedule:
    """Per rank: forwards ahead, then F, I and the W that is due; what is left of W at the end."""
    ranks = []
    for rank in range(stages):
        first, delay = min(microbatches, ahead * (stages - 1 - rank)), ahead * rank
        order = [Action("F", rank, m) for m in range(first)]
        for m in range(microbatches):
            if first + m < microbatches:
                order.append(Action("F", rank, first + m))
            order.append(Action("I", rank, m))
            if m >= delay:
                order.append(Action("W", rank, m - delay))
        order += [Action("W", rank, m) for m in range(max(0, microbatches - delay), microbatches)]
        ranks.append(tuple(order))
    return tuple(ranks)


def zb_v(stages: int, microbatches: int, virtual: int = 2) -> Schedule:
    """Rank r holds stages r and 2p-1-r, so that the last stage stands on the first one's rank."""
    full = max(microbatches, 2 * stages - 1)  # the order is made for so many, then thinned
    ranks = []
    for rank in range(stages):
        line = _Line((rank, 2 * stages - 1 - rank), microbatches)
        line.add("F0", 2 * (stages - rank) - 1)
        line.add("F1 F0", rank)
        line.add("F1 I1 W1", stages - rank)
        while line.done["F1"] < line.done["F0"] or line.done["F0"] < full:
            line.add("F0", int(line.done["F0"] < full))
            line.add("I0 W0 F1 I1 W1")
        line.add("I0 I1", rank)
        line.add("I0 W0", stages - rank)
        line.add("W1", line.done["I1"] - line.done["W1"])
        line.add("W0", line.done["I0"] - line.done["W0"])
        ranks.append(tuple(line.order))
    return tuple(ranks)


class _Line:
    """Writes one rank's order: each kind and chunk ("F0") takes its microbatches one after another."""

    def __init__(self, stages: tuple[int, int], microbatches: int) -> None:
        self.stages, self.microbatches = stages, microbatches
        self.order: list[Action] = []
        self.done: Counter[str] = Counter()

    def add(self, words: str, times: int = 1) -> None:
        for word in words.split() * times:
            kind: Kind = word[0]  # type: ignore[assignment]
            if self.done[word] < self.microbatches:
                self.order.append(Action(kind, self.stages[int(word[1])], self.done[word]))
            self.done[word] += 1


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
}
CHUNKS = {"interleaved": None, "zb-v": 2}
"""Virtual stages a rank where it is not one; None: any number from 2 on."""


def schedule(name: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Every rank's actions under a named schedule.

    stages: pipeline ranks. virtual: stages a rank (zb-v has 2 whatever is given). Raises `PlanError` for
    an unknown name, or for sizes that the schedule cannot have.

    >>> " ".join(map(str, schedule("1f1b", 2, 3)[0]))
    'F0.0 F0.1 B0.0 F0.2 B0.1 B0.2'
    """
    if name not in SCHEDULES:
        raise PlanError("schedule", name, f"one of {', '.join(SCHEDULES)}", nearest(name, SCHEDULES, 1))
    for field, given in (("stages", stages), ("microbatches", microbatches), ("virtual", virtual)):
        if given < 1:
            raise PlanError(field, given, "1 or more")
    if name == "interleaved" and virtual == 1:
        name = "1f1b"
    if name not in CHUNKS and virtual != 1:
        raise PlanError("virtual", virtual, f"1 for {name}", "schedule: interleaved")
    return SCHEDULES[name](stages, microbatches, CHUNKS.get(name) or virtual)
