"""Writes one rank's order of actions the way papers give it: "so many times F0, then F1 I1 W1"."""

from __future__ import annotations

from collections import Counter

from hyperparallel.mpmd.action import Action, Kind


class RankLine:
    """One rank's order; a word is a kind and a chunk ("F0"), and takes its microbatches one after another.

    taken: microbatches so far of forwards ("F0") and backwards ("B0", whole or in halves). waiting: (chunk,
    microbatch) whose weights' gradients are still due, the oldest first: "W0" is the oldest of chunk 0, "W"
    the oldest of any. Microbatches past the last are counted but not written, so that an order that is made
    for many serves for few.
    """

    def __init__(self, stages: tuple[int, int], microbatches: int) -> None:
        self.stages, self.microbatches = stages, microbatches
        self.order: list[Action] = []
        self.taken: Counter[str] = Counter()
        self.waiting: list[tuple[int, int]] = []

    def add(self, words: str, times: int = 1) -> None:
        """The words in turn, so many times."""
        for word in words.split() * times:
            kind: Kind = word[0]  # type: ignore[assignment]
            # A weight gradient is of whatever is due; all other actions count on.
            chunk, microbatch = self._oldest(word[1:]) if kind == "W" else self._next(kind, word[1:])
            if kind == "I":
                self.waiting.append((chunk, microbatch))
            # Counted all the same, so that the words after it mean the microbatches that they meant.
            if microbatch < self.microbatches:
                self.order.append(Action(kind, self.stages[chunk], microbatch))

    def due(self, chunk: int) -> int:
        """Weights' gradients of a chunk that are still waiting."""
        return sum(of == chunk for of, _ in self.waiting)

    def _next(self, kind: Kind, chunk: str) -> tuple[int, int]:
        key = ("F" if kind == "F" else "B") + chunk
        self.taken[key] += 1
        return int(chunk), self.taken[key] - 1

    def _oldest(self, chunk: str) -> tuple[int, int]:
        return self.waiting.pop(next(i for i, (of, _) in enumerate(self.waiting) if chunk in ("", str(of))))
