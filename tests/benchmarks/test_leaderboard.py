"""The scorer: any part of the tables, bad rows named, calibration and folds as they are described."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.leaderboard.__main__ import main
from benchmarks.leaderboard.case import priced, seconds_of
from benchmarks.leaderboard.fit import calibration, fit
from benchmarks.leaderboard.planner import choice, kendall
from benchmarks.leaderboard.score import Errors, calibrated, folds
from benchmarks.leaderboard.tables import read_tables
from hyperparallel.planner.cost.constants import Constants

pytestmark = pytest.mark.pure

HEAD = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)
ROWS = [
    "8,32,4,1024,16,24,1024,2,2,2,219.7",
    "4,32,2,2048,16,16,1024,1,4,1,406.3",
    "8,16,1,2048,16,12,1024,2,4,1,214.0",
    "8,32,1,1024,16,12,1024,1,8,1,180.0",
]
BRIDGE = (
    "container,task,System,Model,#-GPUs,Precision,GBS,MBS,Sequence Length,FSDP,TP,PP,CP,VP,EP,GA,"
    "Tokens / sec / GPU,Model TFLOP / sec / GPU"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vtrain_single.csv").write_text(
        "\n".join([HEAD, *ROWS, "8,x,1,1024,16,12,1024,1,8,1,180", "8"])
    )
    start, end = "25.11,Pre-Training Performance,", ",128,2,8192,0,1,1,1,n/a,1,8,"
    bridge = [
        BRIDGE,
        f"{start}DGX-B200,LLAMA3_8B,8,FP8-CS (FP8-MX){end}30624 (29521),1576 (1519)",
        f"{start}DGX-B200,LLAMA9_8B,8,FP8-CS{end}30624,1576",
        f"{start}DGX-X,LLAMA3_8B,8,FP8-CS{end}30624,1576",
    ]
    (tmp_path / "megatron_bridge_rows.csv").write_text("\n".join(bridge))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    return tmp_path


def test_bad_rows_are_named_not_dropped(folder: Path) -> None:
    cases, skipped = read_tables(folder)
    assert len(cases) == len(ROWS) + 2  # the second precision of a cell is a case of its own
    assert len(skipped) == 4
    assert {s.table for s in skipped} == {"vtrain_single", "megatron_bridge_rows"}
    assert {"line 6", "line 7"} <= {s.name for s in skipped}
    assert any("LLAMA9_8B" in s.name for s in skipped)
    assert any("DGX-X" in s.reason for s in skipped)


def test_command_scores_a_part_of_the_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.json"
    assert main(["--fit", str(folder), "--score", str(folder), "--quick", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["rows"] == 6
    assert result["step_time"]["raw"]["all"]["count"] == 6
    assert len(result["predictions"]) == 6
    text = capsys.readouterr().out
    assert "vtrain_single" in text
    assert "LLAMA9_8B" in text


def test_without_rows_the_committed_constants_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--fit", str(tmp_path), "--quick"]) == 0
    assert "the committed ones" in capsys.readouterr().out


def test_fit_finds_constants_that_made_the_steps(folder: Path) -> None:
    cases = [case for case in read_tables(folder)[0] if case.table == "vtrain_single"]
    made = priced(cases).seconds(Constants().changed(host=6.0, memory=0.6))
    cases = [replace(case, seconds=float(t)) for case, t in zip(cases, made, strict=True)]
    rows = priced(cases)
    before = np.abs(rows.seconds(Constants()) / made - 1).mean()
    assert np.abs(rows.seconds(fit(cases, rows)) / made - 1).mean() < 0.5 * before


def test_calibration_is_one_row_and_unseen_sources_give_up_their_first(folder: Path) -> None:
    cases = read_tables(folder)[0]
    predicted = seconds_of(cases) / np.arange(1.0, len(cases) + 1)
    factors = calibration(cases, seconds_of(cases) / predicted)
    assert factors["vtrain_single"] == pytest.approx(2.0)
    after = calibrated(cases, predicted, {})
    assert np.isnan(after[0])
    assert np.isfinite(after[1])
    assert Errors.of(np.full(2, np.nan), np.ones(2)) is None


def test_folds_hold_every_row_once(folder: Path) -> None:
    cases = read_tables(folder)[0] * 5
    masks = folds(cases)
    assert (np.sum(masks, axis=0) == 1).all()


def test_choice_and_tau(folder: Path) -> None:
    assert kendall(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))[0] == -3
    cases = [case for case in read_tables(folder)[0] if case.group] * 2
    found = choice(cases, seconds_of(cases))
    assert found is not None
    assert found.regret == 0


def test_missing_tables_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "tables"
    assert main(["--fit", str(absent)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"no tables of published runs (*.csv) in {absent}:")
    assert "vtrain_single.csv" in line


def test_make_asks_for_the_folder_of_tables_before_it_installs_anything(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    shutil.copy(root / "Makefile", tmp_path)
    make = ["make", "leaderboard", f"TABLES={tmp_path / 'absent'}"]
    # `make test` tells what it starts that it runs inside make, which then prints more.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        make, cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=60
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert f"no tables of published runs (*.csv) in {tmp_path / 'absent'}" in line
    assert "make leaderboard TABLES=folder" in line
    assert not (tmp_path / ".venv").exists()
