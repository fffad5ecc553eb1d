"""Sweeps: one plan for each combination, the same numbers in every form."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyperparallel.cli.__main__ import app
from hyperparallel.plan.search.find import find
from hyperparallel.plan.search.sweep import COLUMNS, page, sweep, to_csv, to_json, varied
from tests.plan.search.sample import job, tight

pytestmark = pytest.mark.pure


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["sweep", *words])


def test_every_point_is_the_best_of_its_job() -> None:
    jobs = [job("qwen3-0.6b", devices=n, seq=s) for n in (8, 16) for s in (1024, 2048)]
    points = sweep(jobs)
    assert [p.job for p in points] == jobs
    assert [p.best for p in points] == [find(one, keep=1).best[0] for one in jobs]
    assert varied(points) == ["devices", "seq"]


def test_forms_agree() -> None:
    points = sweep([job("qwen3-0.6b", devices=n) for n in (8, 16, 32)])
    rows, records = list(csv.DictReader(io.StringIO(to_csv(points)))), json.loads(to_json(points))
    assert [set(row) for row in rows] == [set(COLUMNS)] * 3
    for row, record in zip(rows, records, strict=True):
        assert float(row["step_seconds"]) == record["step_seconds"]
        assert row["plan"] == record["plan"]
    text = page(points, "a <title>")
    assert text.count("<polyline") == 4 and text.count("<circle") == 12
    assert "a &lt;title&gt;" in text and "http://" not in text


def test_jobs_without_a_plan_are_told_not_dropped() -> None:
    odd = replace(job("gpt2-xl", devices=8, seq=1024), global_batch=7)
    points = sweep([tight(layers=24, capacity=3e9, devices=1, batch=1), odd, job()])
    assert [bool(p.best) for p in points][0::2] == [False, True]
    assert points[0].missing == "does not fit"
    assert page(points, "t").count("does not fit") == 1


def test_command_line(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("s.html", "s.csv", "s.json")]
    words = ["sweep", "qwen3-0.6b,qwen3-1.7b", "--cluster", "h100", "--devices", "8,16"]
    words += ["--html", str(files[0]), "--csv", str(files[1]), "--json", str(files[2])]
    done = CliRunner().invoke(app, [*words, "--global-batch", "32"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(files[2].read_text())) == 4
    assert len(files[1].read_text().splitlines()) == 5
    assert files[0].read_text().count("<polyline") == 8


@pytest.mark.parametrize(
    ("option", "text", "instead"),
    [
        ("--devices", "8;16", "--devices 8,16,32"),
        ("--devices", "0", "--devices 8,16,32"),
        ("--seq", "0,-1", "--seq 4096,8192"),
        ("--seq", "0", "--seq 4096,8192"),
        ("--seq", "4096,,8192", "--seq 4096,8192"),
        ("--global-batch", "0", "--global-batch 512,1024"),
        ("--global-batch", "512,-4", "--global-batch 512,1024"),
    ],
)
def test_numbers_below_one_are_refused(option: str, text: str, instead: str) -> None:
    wrong = run("qwen3-0.6b", "--cluster", "h100", option, text)
    assert wrong.exit_code == 2
    assert f"{option}: got {text!r}; allowed: 1 or more" in wrong.stderr
    assert f"write {instead} instead" in wrong.stderr


def test_no_names_are_refused() -> None:
    assert "MODEL: got ','" in run(",", "--cluster", "h100").stderr
    assert "--cluster: got ''" in run("qwen3-0.6b", "--cluster", "").stderr
