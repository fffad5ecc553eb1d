"""Where the tests of this folder run: ranks on the CPU, and on 1 to all CUDA devices where there are any.

The same functions run in both, so that what a machine without CUDA can check of them is checked there. Ranks
on CUDA come from a fork server: what they run is a function of a module, with arguments that pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch

from hyperparallel.runtime.job.launch import launch

NUM_CUDA = torch.cuda.device_count()
"""Counted without starting CUDA in this process."""


@dataclass(frozen=True)
class Place:
    """Ranks of one kind of device."""

    device: str
    num_ranks: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(session, *args)` of every rank; the session tells its device. No shared memory, as on CUDA."""
        patience = timedelta(seconds=60)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HYPERPARALLEL_TRANSPORT", "messages")
            return launch(
                fn, self.num_ranks, args=args, timeout=150, threads=1, collective_timeout=patience
            )


def places(*cpu_ranks: int) -> Any:
    """Parametrizes `place`: these numbers of ranks on the CPU, and every number of CUDA devices."""
    gpu = (pytest.mark.gpu, pytest.mark.skipif(NUM_CUDA == 0, reason="needs a CUDA device"))
    found = [pytest.param(Place("cpu", n), id=f"cpu{n}", marks=pytest.mark.procs) for n in cpu_ranks]
    counts = range(1, max(NUM_CUDA, 1) + 1)
    found += [pytest.param(Place("cuda", n), id=f"cuda{n}", marks=gpu) for n in counts]
    return pytest.mark.parametrize("place", found)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """What is inside runs on a stream of its own, between what was queued before and what is queued after."""
    if device.type == "cpu":
        yield
        return
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield
    main.wait_stream(side)


def keep_busy(device: torch.device) -> None:
    """Queue work that takes some ms: what is queued behind it has not run when the host goes on."""
    size = 4096 if device.type == "cuda" else 64
    x = torch.full((size, size), 1e-4, device=device)
    for _ in range(4):
        x = x @ x
