"""One live line that says how training goes; plain lines where the output is not a terminal.

    step 40/100  loss 4.812  5.1k tok/s  comm 12%  mem 812 MiB  lr 9.1e-04  eta 0:00:48

On a terminal the line is rewritten in place. In a file or a pipe a line is printed for the first
step, the last, and at most one every `every_seconds` in between.
"""

from __future__ import annotations

import datetime
import math
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hyperparallel.train.metrics import StepRecord


class ProgressLine:
    """A sink that shows the newest record; `steps` is the number in the whole run."""

    def __init__(
        self, steps: int, console: Console | None = None, every_seconds: float = 2.0
    ) -> None:
        self._steps = steps
        self._console = console or Console()
        self._every_seconds = every_seconds
        self._shown = -math.inf
        self._live: Live | None = None
        self._last: StepRecord | None = None
        self._is_shown = True
        if self._console.is_terminal:
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=4)
            self._live.start()

    def write(self, record: StepRecord) -> None:
        self._last, self._is_shown = record, False
        if self._live is not None:
            self._live.update(Text(progress_line(record, self._steps)))
            return
        now = time.monotonic()
        if now - self._shown >= self._every_seconds or record.step + 1 == self._steps:
            self._print(record)
            self._shown = now

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._last is not None and not self._is_shown:
            self._print(self._last)

    def _print(self, record: StepRecord) -> None:
        self._console.print(Text(progress_line(record, self._steps)), soft_wrap=True)
        self._is_shown = True


def progress_line(record: StepRecord, steps: int) -> str:
    """A record in words.

    >>> progress_line(StepRecord(39, 4.8123, 1.5, 9.1e-4, 5123.0, 0.12, 812 << 20, 0.8, 32.0), 100)
    'step 40/100  loss 4.812  5.1k tok/s  comm 12%  mem 812 MiB  lr 9.1e-04  norm 1.50  eta 0:00:48'
    """
    left = round((steps - record.step - 1) * record.step_seconds)
    parts = [
        f"step {record.step + 1}/{steps}",
        f"loss {record.loss:.3f}",
        f"{_short(record.tokens_per_second)} tok/s",
        f"comm {record.comm_share:.0%}" if math.isfinite(record.comm_share) else "",
        f"mem {record.memory_bytes >> 20} MiB",
        f"lr {record.lr:.1e}",
        f"norm {record.grad_norm:.2f}" if math.isfinite(record.grad_norm) else "",
        f"eta {datetime.timedelta(seconds=left)}",
    ]
    return "  ".join(part for part in parts if part)


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
