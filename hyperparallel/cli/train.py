"""`hyperparallel train`: run a recipe on local ranks, or as one rank of a torchrun job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyperparallel.cli.options import FieldWords, MeshText, ModelArgument, PlanFileOption


def train(
    model: ModelArgument,
    fields: FieldWords = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Local ranks to start; none: the mesh's size.")
    ] = None,
    mesh: MeshText = None,
    plan: PlanFileOption = None,
    data: Annotated[
        Path | None, typer.Option(help="File, folder or .jsonl of text; none: Python's library.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with a tokenizer; none: one is trained.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    run_folder: Annotated[
        Path | None, typer.Option(help="Where the run's files go; an old one is resumed.")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="bfloat16: mixed precision, summed over ranks in float32.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline of one step, which Perfetto opens.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the losses with a short single-device run.")
    ] = False,
) -> None:
    """Train a model on many ranks from one command."""
    from hyperparallel.cli.request import read_request

    options: dict[str, object] = {"compute": compute}
    options |= {"data": data, "tokenizer": tokenizer, "steps": steps, "run_folder": run_folder}
    options["trace"] = trace
    request = read_request(
        model, mesh=mesh, plan=plan, overrides=fields or [], devices=devices, options=options
    )
    from hyperparallel.cli.run import run

    run(request, check=check)
