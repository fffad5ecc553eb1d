"""What a step measured, and where it is written: a JSON-lines file, TensorBoard.

One line a step, flushed at once, so a killed run loses nothing and `tail -f` works. A resumed run
first drops the lines of steps that it will do again, so each step stands in the file once. A number
that is not finite is written as null, because JSON has no word for it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hyperparallel.errors import UserError


@dataclass(frozen=True)
class StepRecord:
    """One step: times in seconds of this step alone, except `wall_seconds`, since the start."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    comm_share: float
    memory_bytes: int
    step_seconds: float
    wall_seconds: float


class Sink(Protocol):
    """Somewhere that step records go."""

    def write(self, record: StepRecord) -> None:
        """Take the record of one step."""

    def close(self) -> None:
        """Flush and let go."""


class MetricsFile:
    """A JSON-lines file of step records; `first_step` is the first that this run will write."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # Steps behind the checkpoint are done again; each must stand in the file once.
            _drop_from(path, first_step)
        self._out = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(record).items()
        }
        self._out.write(json.dumps(finite) + "\n")
        self._out.flush()

    def close(self) -> None:
        self._out.close()


class TensorBoardFolder:
    """TensorBoard event files; raises `UserError` where tensorboard is not installed."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            allowed = "False, or True with tensorboard installed"
            instead = "pip install tensorboard, or tensorboard=false"
            raise UserError("tensorboard", True, allowed, instead) from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, record: StepRecord) -> None:
        for key, value in asdict(record).items():
            if key != "step":
                self._writer.add_scalar(f"train/{key}", value, record.step)

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def peak_memory_bytes() -> int:
    """The most memory this process has used: of the GPU where one is in use, else resident."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _drop_from(path: Path, first_step: int) -> None:
    kept = [record for record in read_metrics(path) if record["step"] < first_step]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(record) + "\n" for record in kept)
    os.replace(temporary, path)
