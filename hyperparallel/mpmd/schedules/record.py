"""What a pipeline schedule is: one record, from which everything that lists or prices schedules reads.

A record holds the order of actions, where stages stand, and the closed forms that a search over thousands of
strategies needs instead of following the order. p ranks do m microbatches in v chunks a rank; numbers may be
numpy arrays. The closed forms are claims about the order: tests hold each of them against following it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyperparallel.mpmd.action import Schedule


class RankSeconds(NamedTuple):
    """Seconds of one microbatch on one rank, over all its chunks: forward, gradients of inputs (with what is
    computed again for them), gradients of weights; head: what the rank of the last stage has beyond that."""

    forward: Any
    input_grad: Any
    weight_grad: Any
    head: Any = 0.0

    @property
    def work(self) -> Any:
        """All of it but the head."""
        return self.forward + self.input_grad + self.weight_grad


def round_robin(stage: Any, ranks: Any) -> Any:
    """Stages go round: 0, 1, ..., p - 1, 0, 1, ..."""
    return stage % ranks


def v_shaped(stage: Any, ranks: Any) -> Any:
    """Two chunks a rank, down and back: 0, 1, ..., p - 1, p - 1, ..., 1, 0."""
    return smaller(stage, 2 * ranks - 1 - stage)


def one_chunk(virtual: Any) -> Any:
    """Exactly one."""
    return virtual == 1


def two_chunks(virtual: Any) -> Any:
    """Exactly two."""
    return virtual == 2


@dataclass(frozen=True)
class PipelineSchedule:
    """A named schedule. Everything but `order` and `homes` takes arrays.

    name: as plans write it. words: what it does, in a line of a table.
    order(p, m, v): every rank's actions.
    idle(p, m, v, seconds): seconds that a step takes beyond m times the fullest rank's, where it ends for all
    ranks at once; idle_alone: the same without a head, where each rank begins its next step when it is done.
    held(p, m, v, rank): forwards that a rank keeps at most, as a number of chunks. held_first(p, m, v): those
    of them that belong to the first stage, on its rank.
    home(stage, p): the rank of a stage. chunks(v): whether a rank may have v chunks; usual_chunks: those that
    reports try first. rounds: several chunks need microbatches in whole rounds of p. splits: whether some
    backwards are in halves. pairs(v): whether one microbatch's forward runs beside another's backward all the
    time, so that messages of one can hide behind products of the other. least_rounds: the closed forms hold
    from so many times p microbatches. searched: whether a search for the best strategy tries it.
    """

    name: str
    words: str
    order: Callable[[int, int, int], Schedule]
    idle: Callable[[Any, Any, Any, RankSeconds], Any]
    idle_alone: Callable[[Any, Any, Any, RankSeconds], Any]
    held: Callable[[Any, Any, Any, Any], Any]
    held_first: Callable[[Any, Any, Any], Any]
    home: Callable[[Any, Any], Any] = round_robin
    chunks: Callable[[Any], Any] = one_chunk
    usual_chunks: tuple[int, ...] = (1,)
    rounds: bool = False
    splits: bool = False
    pairs: Callable[[Any], Any] = lambda virtual: 0 * virtual > 0
    least_rounds: int = 0
    searched: bool = True

    def homes(self, ranks: int, virtual: int) -> tuple[int, ...]:
        """The rank of every stage.

        >>> from hyperparallel.mpmd.schedules.table import SCHEDULES
        >>> SCHEDULES["1f1b"].homes(3, 2), SCHEDULES["zb-v"].homes(3, 2)
        ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
        """
        return tuple(self.home(stage, ranks) for stage in range(ranks * virtual))

    def serves(self, ranks: int, microbatches: int, virtual: int) -> bool:
        """Whether a step of these sizes can be run, and is long enough for the closed forms.

        >>> from hyperparallel.mpmd.schedules.table import SCHEDULES
        >>> [SCHEDULES["1f1b"].serves(4, m, 2) for m in (4, 6)], SCHEDULES["zb-v"].serves(4, 4, 2)
        ([True, False], False)
        """
        whole = microbatches % ranks == 0 or virtual == 1 or not self.rounds
        return bool(self.chunks(virtual) and whole and microbatches >= self.least_rounds * ranks)

    def last_rank(self, ranks: Any, virtual: Any) -> Any:
        """The rank of the last stage, which has the head."""
        return self.home(ranks * virtual - 1, ranks)


def larger(*values: Any) -> Any:
    """The largest of numbers or arrays."""
    found = values[0]
    for value in values[1:]:
        # Without a branch, so that numbers and arrays take one path.
        found = found + (value - found) * (value > found)
    return found


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers or arrays."""
    return a + (b - a) * (b < a)
