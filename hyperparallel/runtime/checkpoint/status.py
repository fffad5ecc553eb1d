"""How the ranks of a save or load tell each other "done" or "failed", with no collective.

Every rank leaves a key at a named point of a key-value store; waiting ranks look for the keys and
for one shared failure note, so an error anywhere is known everywhere within a poll (under half a
second). A rank that dies says nothing, so each rank also moves a beat every `patience / 5` seconds;
rank 0 watches all beats, the others watch rank 0's, and a beat that stands still for `patience`
seconds is a failure. Times are local and monotonic: no clocks are compared between machines.

No process group is used: a background save cannot get between a step's collectives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store  # torch 2.13

from hyperparallel.errors import RunError

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.01, 0.4

PATIENCE_SECONDS, DEADLINE_SECONDS = 8.0, 1800.0
"""Silence after which a rank counts as dead; the longest wait for one that lives, and may be writing."""


class Exchange:
    """This rank's side of the agreement; with one rank every call returns at once."""

    def __init__(
        self, store: Store | None, rank: int, world: int, patience: float, deadline: float
    ) -> None:
        self.rank, self.world = rank, world
        self.patience, self.deadline = patience, deadline
        self._round, self._what = 0, ""
        self._stop = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        if world == 1:
            return
        if store is None and not dist.is_initialized():
            raise RunError(f"rank {rank} of {world}: a checkpoint over several ranks needs a store")
        # A client serves one call at a time, so one that blocks elsewhere would hold up the beat.
        self._store = _own_client(store or _get_default_store())
        self._prefix = f"checkpoint/{self._store.add(f'checkpoint/makings/{rank}', 1)}"
        self._thread = threading.Thread(target=self._beat, name="checkpoint-beat", daemon=True)
        self._thread.start()

    def begin(self, what: str) -> None:
        """Start a new round (a save or a load); every rank begins the same rounds in order."""
        self._round += 1
        self._what = what
        self._seen = {}

    def arrive(self, point: str, text: str = "") -> None:
        """Say that this rank has come to `point`, with a word for those who wait."""
        if self._store is not None:
            self._store.set(self._key(point, self.rank), text)

    def fail(self, error: BaseException) -> None:
        """Say that this rank failed; the first failure of a round is the one everybody reports."""
        text = f"rank {self.rank} failed during {self._what}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store may be what failed
            self._note(text)

    def wait_all(self, point: str) -> None:
        """Return when every rank has come to `point`; raises `RunError` when one failed or died."""
        self._wait(point, range(self.world))

    def wait_first(self, point: str) -> str:
        """Return rank 0's word when it has come to `point`; raises like `wait_all`."""
        self._wait(point, (0,))
        return "" if self._store is None else self._get(self._key(point, 0)).decode()

    def close(self) -> None:
        """Stop the beat; the others take a later silence for a death."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _wait(self, point: str, ranks: Iterable[int]) -> None:
        if self._store is None:
            return
        # Polled, each pause longer: waiting in the store would block this client, and no failure be seen.
        late, pause = [rank for rank in ranks if rank != self.rank], _FIRST_POLL_SECONDS
        began = watched = time.monotonic()
        while True:
            # Before the arrivals: of a rank that arrived and one that failed, the failure is the news.
            if self._store.check([self._key("failure")]):
                raise RunError(self._get(self._key("failure")).decode())
            while late and self._store.check([self._key(point, late[-1])]):
                late.pop()
            if not late:
                return
            now = time.monotonic()
            if now - watched > self.patience / 5:
                watched = now
                # Rank 0 watches all, so that keys of n ranks are not read by n ranks.
                self._watch(late if self.rank == 0 else [0], now)
            if now - began > self.deadline:
                self._give_up(f"ranks {late} did not come to '{point}' in {self.deadline:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def _watch(self, ranks: Iterable[int], now: float) -> None:
        assert self._store is not None
        for rank in ranks:
            key = self._beat_key(rank)
            beat = self._get(key) if self._store.check([key]) else b"none yet"
            known, since = self._seen.get(rank, (b"", now))
            if beat != known:
                self._seen[rank] = (beat, now)
            elif now - since > self.patience:
                self._give_up(f"rank {rank} gave no sign of life for {self.patience:.0f} s")

    def _give_up(self, reason: str) -> None:
        text = f"{self._what}: {reason}"
        self._note(text)
        raise RunError(text)

    def _note(self, text: str) -> None:
        if self._store is not None:
            # The first failure stays: later ones follow from it.
            self._store.compare_set(self._key("failure"), "", text)

    def _get(self, key: str) -> bytes:
        assert self._store is not None
        found: bytes = self._store.get(key)
        return found

    def _key(self, point: str, rank: int | None = None) -> str:
        return f"{self._prefix}/{self._round}/{point}/{'' if rank is None else rank}"

    def _beat_key(self, rank: int) -> str:
        return f"{self._prefix}/beat/{rank}"

    def _beat(self) -> None:
        assert self._store is not None
        own, count = _own_client(self._store), 0
        with contextlib.suppress(Exception):  # the store ends with the job
            while True:
                own.set(self._beat_key(self.rank), str(count))
                count += 1
                if self._stop.wait(self.patience / 5):
                    return


def _own_client(store: Store) -> Store:
    client: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch 2.13's stubs
    return client


def guarded(exchange: Exchange, work: Callable[[], None]) -> None:
    """Run `work`; whatever it raises is told to the other ranks first."""
    try:
        work()
    except BaseException as error:
        exchange.fail(error)
        raise
