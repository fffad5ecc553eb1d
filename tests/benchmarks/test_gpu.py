"""The command for machines with CUDA: no part takes another down, and its end says what became of each."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.parts import Part, parts
from benchmarks.gpu.rows import BLOCK_ROWS, STEP_ROWS
from benchmarks.gpu.run import Status, run_part, run_parts, table
from benchmarks.gpu.speed import Found, built, laid_out
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session

pytestmark = pytest.mark.fake

RAISES = "def inner():\n    raise ValueError('no such kernel')\ninner()"
HANGS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
open(sys.argv[1], "w").write(str(child.pid))
def stuck(): time.sleep(1000)
stuck()
"""


def part(name: str, program: str, seconds: float = 60.0, *words: str) -> Part:
    return Part(name, f"runs {name}", (sys.executable, "-c", program, *words), seconds)


def gone(pid: int) -> bool:
    """Not running any more, or not in a moment."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_every_part_runs_and_tells_how_it_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    wanted = [
        part("raises", RAISES),
        part("hangs", HANGS, 3.0, str(pid)),
        part("works", "import os; print('all', 'well', os.environ['WORD'])"),
    ]
    wanted[2] = Part(*list(vars(wanted[2]).values())[:4], {"WORD": "here"})
    said: list[str] = []
    outcomes = run_parts(wanted, tmp_path / "out", time.monotonic() + 300, said.append)
    assert [one.status for one in outcomes] == [Status.FAILED, Status.LATE, Status.PASSED]

    logs = {one.name: one.log.read_text() for one in outcomes}
    assert "in inner" in logs["raises"] and "ValueError: no such kernel" in outcomes[0].note
    assert "in stuck" in logs["hangs"] and "within 3 s" in outcomes[1].note  # where it hung
    assert "all well here" in logs["works"] and outcomes[2].note == ""
    assert gone(int(pid.read_text())), "what a part started ends with it"

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(row["name"], row["status"]) for row in summary] == [
        ("raises", "failed"), ("hangs", "late"), ("works", "passed"),
    ]  # fmt: skip
    shown = table(outcomes)
    assert "1 of 3 parts passed" in shown and str(outcomes[0].log) in shown
    assert any("runs works" in line for line in said)


def test_what_a_part_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    leaves = "import subprocess, sys\nchild = subprocess.Popen(['sleep', '900'])\n"
    leaves += "open(sys.argv[1], 'w').write(str(child.pid))"
    assert run_part(part("leaves", leaves, 60, str(pid)), 60, tmp_path / "log").status is Status.PASSED
    assert gone(int(pid.read_text()))


def test_a_part_deaf_to_signals_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\ntime.sleep(900)"
    began = time.monotonic()
    assert run_part(part("deaf", deaf), 2.0, tmp_path / "log").status is Status.LATE
    assert time.monotonic() - began < 30


def test_parts_without_time_are_skipped(tmp_path: Path) -> None:
    outcomes = run_parts([part("first", "pass"), part("second", "pass")], tmp_path, time.monotonic() + 1)
    assert [one.status for one in outcomes] == [Status.SKIPPED] * 2
    assert "0 of 2 parts passed" in table(outcomes)


def test_without_cuda_it_says_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "num_cuda_devices", lambda: 0)
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 0
    said = capsys.readouterr().out
    assert "No CUDA device: nothing was run" in said
    assert all(f"  {one.name} " in said and one.about in said for one in parts("cuda", 1, tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("program", "status"), [("pass", 0), ("raise SystemExit(3)", 1)])
def test_the_exit_status_says_whether_all_passed(
    program: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, int]] = []

    def wanted(device: str, num_ranks: int, folder: Path, minutes: float) -> list[Part]:
        asked.append((device, num_ranks))
        return [part("one", "pass"), part("two", program)]

    monkeypatch.setattr(command, "num_cuda_devices", lambda: 4)
    monkeypatch.setattr(command, "parts", wanted)
    assert command.main(["--folder", str(tmp_path)]) == status
    assert asked == [("cuda", 4)] and (tmp_path / "two.log").exists()


def test_installing_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "num_cuda_devices", lambda: 1)
    assert command.main(["--started", str(time.time() - 500), "--folder", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert {row["status"] for row in rows} == {"skipped"} and len(rows) == len(parts("cuda", 1, tmp_path))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_budgets_fit_in_the_minutes_and_commands_exist(num_ranks: int, tmp_path: Path) -> None:
    for minutes in (8.0, 20.0):
        wanted = parts("cuda", num_ranks, tmp_path, minutes)
        assert sum(one.seconds for one in wanted) == pytest.approx(60 * minutes)
    modules = {one.words[one.words.index("-m") + 1] for one in wanted}
    ours = {f"benchmarks.gpu.{name}" for name in ("versions", "predicted", "speed")}
    assert modules == {"pytest", "hyperparallel", *ours}


def first_steps(session: Session) -> dict[str, dict[str, Found]]:
    """The rows of both tables that no compiler is needed for."""
    tables = {"block": BLOCK_ROWS, "step": STEP_ROWS}
    return {
        name: {row.name: built(row, session.device)[0] for row in rows if not row.name.endswith(COMPILED)}
        for name, rows in tables.items()
    }


COMPILED = ("Inductor", "torch.compile")


@pytest.mark.procs
def test_every_row_runs_and_has_the_losses_of_one_device() -> None:
    for found in launch(first_steps, 2, threads=1, timeout=200):
        for which, rows in found.items():
            for one in rows.values():
                assert one.failure is None
                one.seconds = [1.0]
            table, good = laid_out(which, rows, "here")
            assert good and {row[4] for row in table.rows} == {""}, table.markdown()


def test_a_row_of_ours_that_fails_or_is_wrong_fails_the_table() -> None:
    ran = {name: Found([2.0, 1.0], [0.1, 0.2, 0.3]) for name in ("one device", "parallelize_module")}
    fine = ran | {"hyperparallel": Found([2.0, 1.0 + 1e-6], [0.05, 0.1, 0.2])}
    shown, good = laid_out("block", fine, "here")
    assert good and [row[2] for row in shown.rows] == [1.0, 1.0, 2.0]
    assert not laid_out("block", ran | {"hyperparallel": Found([2.0, 1.01], [0.1])}, "here")[1]
    assert not laid_out("block", ran | {"hyperparallel": Found(failure="CaptureError: no")}, "here")[1]
    assert laid_out("block", ran | {"parallelize_module": Found(failure="no")}, "here")[1]
