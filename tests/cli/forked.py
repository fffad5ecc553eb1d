"""The command line in a process forked from this one, which has imported torch: 5 s sooner than a new one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

import hyperparallel.train.job  # noqa: F401  with what it imports, so that no forked process has to
import tests.cli.tiny  # noqa: F401
from hyperparallel.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def run_forked(
    words: list[str], environment: Mapping[str, str], timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """`hyperparallel *words` with what it wrote and its exit status, as `subprocess.run` tells them."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        given = (words, environment, out, err)
        process = multiprocessing.get_context("fork").Process(target=_main, args=given)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["hyperparallel", *words], timeout)
        out.seek(0)
        err.seek(0)
        status = process.exitcode
        return subprocess.CompletedProcess(["hyperparallel", *words], status, out.read(), err.read())


def _main(words: list[str], environment: Mapping[str, str], out: IO[str], err: IO[str]) -> None:
    """The forked process: what was pytest's (streams, environment, warnings as errors) becomes a shell's."""
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # the pool of the process that was forked is not there
    warnings.simplefilter("default")
    sys.argv = ["hyperparallel", *words]
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
