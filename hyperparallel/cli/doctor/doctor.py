"""`hyperparallel doctor`: what this machine has, what would work on it, and how fast it is.

Exit status 0 if training on local ranks would work, 1 if something that it needs is missing. `--calibrate`
times the machine and keeps the description that plans for the cluster "laptop" are made with.
"""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help='Time this machine and describe it as the cluster "laptop".')
    ] = False,
    ranks: Annotated[
        int, typer.Option("--ranks", help="Local ranks that compute at once while calibrating.", min=1)
    ] = 4,
) -> None:
    """Say what this machine has and what would work; exit status 1 if training would not."""
    from hyperparallel.cli.doctor.diagnosis import diagnose

    diagnose(calibrate, ranks)
