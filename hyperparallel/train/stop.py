"""A clean stop on Ctrl-C or SIGTERM, after the same step on every rank.

A signal, or the message of a launcher, reaches ranks at different moments, and a rank that stopped
alone would leave the others in a collective. So the rank that sees it first writes in the store after
which step to stop: the one after the step it is about to begin. No rank can have begun a later one by
then, since each step needs all ranks. Every rank looks before each step. A second Ctrl-C interrupts
at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store  # torch 2.13

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSign:
    """Says before each step whether to stop.

    store: None takes the default process group's. asked: looked at before each step, beside `ask`.
    """

    def __init__(
        self, rank: int, world: int, store: Store | None = None, asked: Callable[[], bool] = lambda: False
    ) -> None:
        self._is_asked, self._asked = False, asked
        self._store: Store | None = None
        if world > 1 and (store is not None or dist.is_initialized()):
            self._store = store or _get_default_store()
            making = self._store.add(f"train/stop/makings/{rank}", 1)
            self._key = f"train/stop/{making}"

    def ask(self) -> None:
        """Stop soon; safe in a signal handler."""
        self._is_asked = True

    def before(self, step: int) -> bool:
        """Whether the run ends before `step`; the same answer on every rank."""
        self._is_asked |= self._asked()
        if self._store is None:
            return self._is_asked
        if self._is_asked:
            # The first word stays, so that two ranks that are asked at once cannot name two steps.
            self._store.compare_set(self._key, "", str(step + 2))
        if not self._store.check([self._key]):
            return False
        return step >= int(self._store.get(self._key))


@contextmanager
def on_signals(sign: StopSign) -> Iterator[None]:
    """While inside, SIGINT and SIGTERM ask `sign` to stop; only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:  # noqa: ARG001 -- a signal handler
        sign.ask()
        if signal.SIGINT in caught:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # A launched rank ignores SIGINT: its launcher decides. That stays so, also after a SIGTERM.
    caught = [s for s in _SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, ask) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
