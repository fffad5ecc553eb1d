"""A training run from the command line: prepare, start ranks, tell how it went, check it.

Text is prepared before any rank starts, so that mistakes end at once. This process only launches
(or is one rank, under torchrun); after the run it repeats the first steps on one device if asked
to, and compares the losses.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hyperparallel.cli.request import Request, write_text
from hyperparallel.errors import DataError, RunError, UserError
from hyperparallel.plan.derived import Derived
from hyperparallel.plan.page import html_page
from hyperparallel.plan.report import text_report

if TYPE_CHECKING:
    from hyperparallel.train.job import TrainJob
    from hyperparallel.train.loop import TrainResult

CHECK_STEPS = 10
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 2e-2}
"""Largest relative difference of a loss from the single-device run: the order of sums differs."""

FLOAT32_LOSS = 1e-6
"""At least, where the losses are 32-bit numbers: transformers computes them so for a float64 model too."""

GRACE_SECONDS = 6.0
"""For ranks to save and leave after Ctrl-C or a failure; a failed run must end within 10 s."""


def run(request: Request, *, check: bool) -> None:
    """Train, and with `check` compare the first losses with a single-device run."""
    from hyperparallel.runtime.job.launch import launch
    from hyperparallel.runtime.job.session import open_session, ranks_from_environment
    from hyperparallel.train.job import train_rank

    given = ranks_from_environment()
    request = with_run_folder(request, shared=given is not None)
    job = make_job(request)
    if given is not None:
        with open_session(given) as session:
            result = train_rank(session, job)
        if given.rank != 0:
            return
    else:
        result = launch(train_rank, request.plan.mesh.size, args=(job,), grace=GRACE_SECONDS)[0]
    _tell(job, result)
    if check and not result.was_stopped:
        check_losses(job, result)


def with_run_folder(request: Request, *, shared: bool) -> Request:
    """The request with a folder for its files: the given one, or a new one named by the time.

    shared: ranks of other launchers use it too; they cannot agree on a new name, so a run that
    saves must name one.
    """
    config = request.config
    if config.run_folder is None:
        if shared and config.checkpoint_every:
            raise UserError("run_folder", None, "a folder, on which ranks under torchrun agree")
        folder = Path("runs") / f"{request.recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = config.model_copy(update={"run_folder": folder})
    return Request(request.recipe, config, request.plan)


def make_job(request: Request) -> TrainJob:
    """Prepare text and tokenizer, and settle what depends on them."""
    from hyperparallel.train.job import TrainJob
    from hyperparallel.train.tokens import prepare_corpus

    config = request.config
    corpus = prepare_corpus(
        config.data,
        config.tokenizer,
        vocab_size=config.vocab_size,
        max_bytes=config.max_text_bytes,
    )
    if corpus.tokens.vocab_size > config.vocab_size:
        if "vocab_size" in request.recipe.fields:
            given = f"{corpus.tokenizer_path} with {corpus.tokens.vocab_size} tokens"
            raise DataError("tokenizer", given, f"at most the model's {config.vocab_size} tokens")
        config = config.model_copy(update={"vocab_size": corpus.tokens.vocab_size})
    assert config.run_folder is not None  # `with_run_folder` saw to it
    show = partial(announce, config.run_folder, request.recipe.name, len(corpus.tokens))
    return TrainJob(config, request.plan, request.recipe.model, corpus.tokens.path, show)


def announce(folder: Path, name: str, num_tokens: int, derived: Derived) -> None:
    """Print what was derived and write it to the run's folder; runs on rank 0."""
    typer.echo(text_report(derived))
    typer.echo(f"\ntext: {num_tokens} tokens")
    write_text(folder / "plan.json", derived.to_json(), "run_folder")
    write_text(folder / "plan.html", html_page(derived, name), "run_folder")


def _tell(job: TrainJob, result: TrainResult) -> None:
    if result.losses:
        first, last = result.losses[0], result.losses[-1]
        steps = f"steps {result.first_step + 1} to {result.next_step}"
        typer.echo(f"{steps}: loss {first:.4f} -> {last:.4f}")
    else:
        typer.echo(f"nothing left to do: the run in {job.config.run_folder} has all its steps")
    folder = job.config.run_folder
    assert folder is not None
    if result.was_stopped:
        typer.echo(f"stopped; go on with --run-folder {folder}")
    files = ", ".join(sorted(os.listdir(folder))) if folder.exists() else "none"
    typer.echo(f"files in {folder}: {files}")


def check_losses(job: TrainJob, result: TrainResult) -> None:
    """Repeat the first steps on one device; `RunError` if a loss differs by more than rounding."""
    from hyperparallel.train.job import single_device_losses

    if result.first_step != 0:
        typer.echo("check left out: the run was resumed, its first losses are another run's")
        return
    alone = single_device_losses(job, CHECK_STEPS)
    together = result.losses[: len(alone)]
    differences = [abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True)]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    allowed = TOLERANCE[job.plan.compute or job.config.dtype]
    if all(ctypes.c_float(loss).value == loss for loss in alone):
        allowed = max(allowed, FLOAT32_LOSS)
    said = f"{len(alone)} steps on one device: largest relative difference {worst:.1e}"
    if not worst <= allowed:
        raise RunError(f"{said}, allowed {allowed:.0e}: the sharded run is not the same run")
    typer.echo(f"check passed: {said} (allowed {allowed:.0e})")
