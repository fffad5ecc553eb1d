"""`hyperparallel doctor`: what this machine has, and what would work on it.

Exit status 0 if training on local ranks would work, 1 if something that it needs is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from hyperparallel.cli.machine import Finding, findings, num_cores

MARKS = {True: "ok", None: "--", False: "NO"}


def doctor() -> None:
    """Say what this machine has and what would work; exit status 1 if training would not."""
    found = findings()
    width = max(len(item.name) for item in found)
    for item in found:
        line = f"{MARKS[item.good]}  {item.name:<{width}}  {item.found}"
        typer.echo(f"{line}  ({item.advice})" if item.advice else line)
    typer.echo("")
    for sentence in verdicts(found):
        typer.echo(sentence)
    raise typer.Exit(1 if missing(found) else 0)


def missing(found: Sequence[Finding]) -> list[str]:
    """Names of what a run needs and this machine lacks."""
    return [item.name for item in found if item.good is False]


def verdicts(found: Sequence[Finding]) -> list[str]:
    """What would work, one sentence each."""
    if lacks := missing(found):
        return [f"Training would not work: {', '.join(lacks)}."]
    by_name = {item.name: item for item in found}
    devices = [item for item in found if item.name.startswith("CUDA device")]
    cores = num_cores()
    said = []
    if devices and by_name["NCCL"].good:
        said.append(f"Training on {len(devices)} CUDA devices over NCCL would work.")
    elif devices:
        said.append("CUDA devices are there but NCCL is not: ranks would talk over gloo.")
    said.append(
        f"Training on CPU ranks over gloo would work; {cores} ranks keep {cores} cores busy, "
        "more take turns."
    )
    compiler = by_name["C++ compiler"].good
    said.append(f"compile=True would {'work' if compiler else 'not work'} on CPU ranks.")
    return said
