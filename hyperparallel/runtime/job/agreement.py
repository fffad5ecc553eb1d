"""Ranks agree on what they decided before they run it.

An integer program may stop at a time limit, environments and library versions may differ, a rank may get
another batch or build another model: then ranks would run different programs and deadlock, or compute
nonsense. So each rank leaves a hash of its decisions in the job's store and reads the others'. Where they
differ, all ranks exchange the decisions and raise the same error, which names the ranks and the first
decision that differs. A rank that does not come is named at the deadline; one that runs a program which it
has already, and waits for this rank in a collective of that, says so sooner (`comm/meeting.py`).

Nothing is done per step. Per program: the words of some thousand decisions (`graph/decided.py`), a hash,
and one word through the store for each rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from hyperparallel.errors import RunError
from hyperparallel.graph.decided import Decision
from hyperparallel.runtime.comm.meeting import meet_members
from hyperparallel.runtime.job.here import Here

FOR_A_CALL = "as for every new kind of call: all ranks must pass the same global batch, in the same modes"
"""The reason to agree that a batch gives: a rank that has the program of its own batch does not come."""


def agree(here: Here, decided: Sequence[Decision], about: str, reason: str = "") -> None:
    """Raise `RunError` on all ranks of the mesh unless all decided the same; they must call this together.

    about: what the decisions are about, for errors; reason: when ranks agree on that, for the error of one
    that does not come. Raises `PeerLost` for ranks that do not come before the deadline of a collective.
    """
    ranks = here.mesh.ranks
    if len(ranks) == 1:
        return
    text = json.dumps(decided)
    why = f"agree on {about}" + (f", {reason}" if reason else "")
    # The decisions only where hashes differ: thousands of words, which each rank reads of every other.
    hashes = _told(here, hashlib.sha256(text.encode()).hexdigest(), why)
    if len(set(hashes)) > 1:
        told = [json.loads(each) for each in _told(here, text, f"compare what they decided for {about}")]
        raise RunError(f"{about}: {first_difference(ranks, told)}; every rank must run the same program")


def _told(here: Here, word: str, why: str) -> list[str]:
    place = f"agreement/{'-'.join(map(str, here.mesh.ranks))}"
    seconds = here.groups.timeout.total_seconds()
    return meet_members(place, here.rank, here.mesh.ranks, word, seconds, why)


def first_difference(ranks: Sequence[int], told: Sequence[Sequence[Sequence[str]]]) -> str:
    """Which ranks differ in which decision; `told` holds each rank's decisions.

    >>> same = ["batch, x", "float32 of shape [4]"]
    >>> first_difference((0, 2, 3), [[same, ["w", "(tp)"]], [same, ["w", "(-)"]], [same, ["w", "(-)"]]])
    'the first decision that differs is w: (tp) on rank 0, (-) on ranks 2, 3'
    """
    longest = max(map(len, told))
    padded = [[*map(tuple, each), *[("", "nothing more")] * (longest - len(each))] for each in told]
    place = next(i for i in range(longest) if len({each[i] for each in padded}) > 1)
    at = [each[place] for each in padded]
    labels = {label for label, _ in at if label}
    by_words: dict[str, list[int]] = {}
    for rank, (label, value) in zip(ranks, at, strict=True):
        words = value if len(labels) == 1 or not label else f"{label}: {value}"
        by_words.setdefault(words, []).append(rank)
    about = labels.pop() if len(labels) == 1 else f"number {place}"
    where = [
        f"{words} on rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}"
        for words, those in by_words.items()
    ]
    return f"the first decision that differs is {about}: {', '.join(where)}"
