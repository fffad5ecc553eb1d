"""Run parts one after the other, each within its budget, whatever becomes of the others.

What a part prints, tracebacks included, goes to NAME.log in the folder of results. A part that is late is
first asked where it hangs (SIGABRT: `PYTHONFAULTHANDLER` writes the stack of every thread to its log), then
killed with everything it started.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.parts import Part

ROOT = Path(__file__).resolve().parents[2]
LEAST_SECONDS = 5.0
"""With less than this left, a part is not begun."""
GRACE_SECONDS = 2.0


class Status(enum.Enum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "failed"  # another exit status than 0
    LATE = "late"  # killed at the end of its budget
    SKIPPED = "skipped"  # no time was left for it


@dataclass(frozen=True)
class Outcome:
    """What became of a part. note: the line that says most of why it did not pass."""

    name: str
    status: Status
    seconds: float
    log: Path
    note: str = ""


def run_parts(
    parts: Sequence[Part], folder: Path, deadline: float, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Run all parts and keep `summary.json` true after each; deadline: of all, by `time.monotonic`."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part in parts:
        left = min(part.seconds, deadline - time.monotonic())
        log = folder / f"{part.name}.log"
        if left < LEAST_SECONDS and left < part.seconds:
            outcomes.append(Outcome(part.name, Status.SKIPPED, 0.0, log, "no time was left"))
        else:
            say(f"{part.name}: {part.about} (at most {left:.0f} s)")
            outcomes.append(run_part(part, left, log))
        last = outcomes[-1]
        say(f"  {last.status.value} after {last.seconds:.0f} s{': ' if last.note else ''}{last.note}")
        rows = [{**vars(one), "status": one.status.value, "log": one.log.name} for one in outcomes]
        (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    return outcomes


def run_part(part: Part, seconds: float, log: Path) -> Outcome:
    """One part to its end or to the end of its seconds."""
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"} | dict(part.environment)
    begin = time.monotonic()
    with log.open("w") as out:
        out.write(f"$ {' '.join(part.words)}\n")
        out.flush()
        process = subprocess.Popen(
            part.words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    took = time.monotonic() - begin
    if code == 0:
        return Outcome(part.name, Status.PASSED, took, log)
    if code is None:
        return Outcome(part.name, Status.LATE, took, log, f"did not end within {seconds:.0f} s")
    return Outcome(part.name, Status.FAILED, took, log, f"exit status {code}: {last_line(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs of a part: it leads a session, so all that it started is in its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def table(outcomes: Sequence[Outcome]) -> str:
    """The end of the command: a line for each part, and where its file is."""
    width = max(len(one.name) for one in outcomes)
    lines = [
        f"{one.name:<{width}}  {one.status.value:<7}  {one.seconds:>5.0f} s  {one.log}"
        + (f"\n{'':<{width}}  {one.note}" if one.note else "")
        for one in outcomes
    ]
    count = sum(one.status is Status.PASSED for one in outcomes)
    return "\n".join(["", *lines, "", f"{count} of {len(outcomes)} parts passed"])
