"""Runs a function on several local ranks; the one way in which tests get real processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hyperparallel.runtime.job.launch import launch


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
    """`[fn(rank, *args) for every rank]`, each in its own process in the default process group.

    One thread a rank, so ranks are forked and `fn` may be a closure. The registry of groups in a
    rank is `Groups.of_default()`. Raises `RunError` with the failing rank's traceback, or after
    `timeout`.
    """
    return launch(
        lambda session, *rest: fn(session.rank, *rest),
        n,
        args=args,
        timeout=timeout,
        collective_timeout=timedelta(seconds=timeout),
        threads=1,
    )
