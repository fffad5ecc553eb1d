"""The package and its command line start at once, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hyperparallel

pytestmark = pytest.mark.pure


def _python(*arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the interpreter; cache: where it keeps compiled modules, as an installation does beside them."""
    environment = dict(os.environ)
    if cache is not None:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(cache)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


@pytest.mark.parametrize("module", ["hyperparallel", "hyperparallel.cli.__main__"])
def test_importing_does_not_import_torch(module: str) -> None:
    heavy = "{'torch', 'transformers', 'tokenizers'}"
    done = _python("-c", f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))")
    assert done.stdout.strip() == "[]", done.stderr


def test_public_names_are_listed_and_unknown_ones_refused() -> None:
    assert set(hyperparallel.__all__) <= set(dir(hyperparallel))
    with pytest.raises(AttributeError, match="no attribute 'Layouts'"):
        hyperparallel.Layouts  # noqa: B018


@pytest.mark.alone
def test_help_starts_under_a_second(tmp_path: Path) -> None:
    seconds = []
    for _ in range(4):  # the first compiles; then the best of three, as a busy machine slows single runs
        start = time.perf_counter()
        done = _python("-m", "hyperparallel", "plan", "--help", cache=tmp_path)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "--mesh" in done.stdout
    assert min(seconds) < 1.0, seconds
