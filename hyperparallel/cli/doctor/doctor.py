"""`hyperparallel doctor`: what this machine has, what would work on it, and how fast it is.

Exit status 0 if training on local ranks would work, 1 if something that it needs is missing. `--calibrate`
times the machine and keeps the description that plans for the cluster "laptop" are made with.
"""

from __future__ import annotations

from typing import Annotated

import typer

CALIBRATED_RANKS = 4


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help='Time this machine and describe it as the cluster "laptop".')
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="Local ranks that compute at once while calibrating; else 4.", min=1),
    ] = None,
) -> None:
    """Say what this machine has and what would work; exit status 1 if training would not."""
    from hyperparallel.cli.doctor.diagnosis import diagnose
    from hyperparallel.errors import UserError

    if ranks is not None and not calibrate:
        raise UserError("--ranks", ranks, "with --calibrate only", f"--calibrate --ranks {ranks}")
    diagnose(calibrate, ranks or CALIBRATED_RANKS)
