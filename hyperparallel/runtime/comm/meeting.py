"""Members of a group meet in the job's store: each leaves a word and reads the others'.

For what happens rarely and must not depend on the ranks being where they should be: before a group is
connected, before a program runs. A collective cannot do that, since a rank that is elsewhere may be in
another collective of the same group. Every wait has a deadline and names the ranks that did not come.

The store counts the meetings of each place and rank, so nothing is kept here, and members meet as long as
they come to a place equally often. Waiting asks again and again: a blocking wait would hold the store's
lock, which other threads of the process need (checkpoints). A word costs about 50 microseconds when the
others are there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store  # private name, checked on torch 2.13

from hyperparallel.runtime.comm.group import PeerLost

SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 10e-3
"""Seconds between two looks at the store; each pause is half as long again as the one before."""


def meet_members(
    store: Store, place: str, rank: int, ranks: Sequence[int], word: str, seconds: float, why: str
) -> list[str]:
    """The words of all `ranks` (this `rank` among them), in their order, once all have come.

    place: names the meeting, the same on all of them. seconds: how long to wait. why: what they meet
    for, for the error. Raises `PeerLost` that names the ranks that did not come.
    """
    number = store.add(f"meet/{place}/count/{rank}", 1)
    keys = {other: f"meet/{place}/{number}/{other}" for other in ranks}
    store.set(keys[rank], word)
    missing = [other for other in ranks if other != rank]
    deadline, pause = time.monotonic() + seconds, SHORTEST_PAUSE
    while missing:
        missing = [other for other in missing if not store.check([keys[other]])]
        if missing:
            if time.monotonic() > deadline:
                who = ", ".join(map(str, missing))
                raise PeerLost(
                    f"rank {rank}: rank {who} did not come within {seconds:g} s to {why} "
                    f"(ranks {', '.join(map(str, ranks))})"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
    return [store.get(keys[other]).decode() for other in ranks]
