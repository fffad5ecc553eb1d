"""Members of a group meet in the job's store: each leaves a word and reads the others'.

For what happens rarely and must not depend on the ranks being where they should be: before a group is
connected, before a program runs. A collective cannot do that, since a rank that is elsewhere may be in
another collective of the same group. Every wait has a deadline and names the ranks that did not come.

The store counts the meetings of each place and rank, so nothing is kept here, and members meet as long as
they come to a place equally often. A word costs about 50 microseconds when the others are there.

A rank that waits here for another one that waits for it in a collective is a deadlock. So a rank that has
waited for a moment leaves a note in the store, and a rank whose collective is slow looks for one that waits
for it (`why_peers_wait`): shared memory each second, a process group, which cannot be asked in between, when
its collective has failed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence

from torch._C._distributed_c10d import Store  # private name, checked on torch 2.13
from torch.distributed.distributed_c10d import _get_default_store  # private name, checked on torch 2.13

from hyperparallel.runtime.comm.group import PeerLost

SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 10e-3
"""Seconds between two looks at the store; each pause is half as long again as the one before."""

NOTE_SECONDS = 0.2
"""How long a member waits before it leaves a note; most meetings are over by then and cost no more."""


def meet_members(
    place: str, rank: int, ranks: Sequence[int], word: str, seconds: float, why: str
) -> list[str]:
    """The words of all `ranks` (this `rank` among them), in their order, once all have come.

    place: names the meeting, the same on all of them. seconds: how long to wait. why: what they meet
    for, for errors. Raises `PeerLost` that names the ranks that did not come.
    """
    store = _get_default_store()
    number = store.add(f"meet/{place}/count/{rank}", 1)
    keys = {other: f"meet/{place}/{number}/{other}" for other in ranks}
    store.set(keys[rank], word)
    missing = [other for other in ranks if other != rank]
    began, pause = time.monotonic(), SHORTEST_PAUSE
    with contextlib.ExitStack() as stack:
        noted = False
        while missing:
            # Asked again and again: a blocking wait holds the store's lock, which other threads need.
            missing = [other for other in missing if not store.check([keys[other]])]
            waited = time.monotonic() - began
            if not missing:
                break
            if waited > seconds:
                who = ", ".join(map(str, missing))
                raise PeerLost(
                    f"rank {rank}: rank {who} did not come within {seconds:g} s to {why} "
                    f"(ranks {', '.join(map(str, ranks))})"
                )
            if waited > NOTE_SECONDS and not noted:
                stack.enter_context(_note(store, rank, {"why": why, "keys": keys}))
                noted = True
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
    return [store.get(keys[other]).decode() for other in ranks]


def why_peers_wait(rank: int, peers: Sequence[int]) -> str:
    """Which of `peers` waits in a meeting to which `rank` has not come, and why; "" where none does."""
    with contextlib.suppress(RuntimeError):  # the store may have ended with a rank: then nobody can tell
        store = _get_default_store()
        for peer in peers:
            key = _note_key(peer)
            note = store.get(key) if store.check([key]) else b""
            told = json.loads(note) if note else {"keys": {}}
            own = told["keys"].get(str(rank))
            # A note alone proves nothing: a peer that this rank has met may not have looked again yet.
            if own is not None and not store.check([own]):
                return f"rank {peer} waits for rank {rank} to {told['why']}"
    return ""


@contextlib.contextmanager
def _note(store: Store, rank: int, note: dict[str, object]) -> Iterator[None]:
    """Inside, others can read what this rank waits for."""
    store.set(_note_key(rank), json.dumps(note))
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # what ended the meeting is the error to see
            store.set(_note_key(rank), "")


def _note_key(rank: int) -> str:
    return f"meet/note/{rank}"
