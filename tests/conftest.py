"""What every test shares: markers of doctests, workers that leave each other room, CPU unless asked for CUDA.

`make test` runs two workers. A test marked `alone` holds a bound of seconds: it waits until the other worker
has ended its test, and that one waits for it. Tests run on CPU also where there is a CUDA device, for which
most of them are not written; `HYPERPARALLEL_TESTS=cuda` (`make gpu`) shows the devices to those marked `gpu`.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from checks.imports import LEFT_OF_TORCH

if os.environ.get("HYPERPARALLEL_TESTS") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything has asked for devices; ranks inherit it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: as many workers as cores compute at once

# Examples are the same in every run, and a busy machine fails none: every test has pytest's timeout anyway.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")

PACKAGE = Path(__file__).resolve().parent.parent / "hyperparallel"
PURE = {name for row in LEFT_OF_TORCH for name in row}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.path.is_relative_to(PACKAGE):
            parts = item.path.relative_to(PACKAGE).with_suffix("").parts
            item.add_marker(pytest.mark.pure if parts[0] in PURE else pytest.mark.fake)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the timeout's clock
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests marked `alone` hold a lock of their own, all others share it; without workers nobody waits."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    # Whoever wants to be alone waits in the door, or workers that share would never all have let go.
    with ExitStack() as held:
        with _locked(run, "door", fcntl.LOCK_EX):
            held.enter_context(_locked(run, "room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@contextmanager
def _locked(run: str, name: str, kind: int) -> Iterator[None]:
    """A lock between the workers of a run; let go of by name, as forked ranks have the file open too."""
    with open(Path(tempfile.gettempdir()) / f"hyperparallel-tests-{run}-{name}", "a") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
