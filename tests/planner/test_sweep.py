"""Sweeps: one plan for each combination, the same numbers in every form."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyperparallel.cli.__main__ import app
from hyperparallel.cli.planning import Wanted, planned
from hyperparallel.cli.sweep import points_of
from hyperparallel.cluster.files import cluster_yaml
from hyperparallel.plan.wording import bytes_words
from hyperparallel.planner.explain.rows import rows as plan_rows
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.planning import plan_job
from hyperparallel.planner.search.search import OBJECTIVES, Objective
from hyperparallel.planner.search.space import Limits
from hyperparallel.planner.sweep import (
    SWEEP_COLUMNS,
    TITLES,
    legend,
    noted,
    page,
    plot,
    point_of,
    point_rows,
    points_json,
    series,
    sweep,
    to_csv,
    varied,
)
from tests.planner.sample import job, tight

pytestmark = pytest.mark.pure


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["sweep", *words])


def test_every_point_is_the_first_row_of_its_plan() -> None:
    jobs = [job("qwen3-0.6b", devices=n, seq=s) for n in (8, 16) for s in (1024, 2048)]
    points = sweep(jobs)
    plannings = [plan_job(one) for one in jobs]
    assert [p.planning and p.planning.best for p in points] == [planning.best for planning in plannings]
    assert varied(points) == ["devices", "seq"]
    for point, words, planning in zip(points, point_rows(points), plannings, strict=True):
        plan, *numbers = plan_rows(planning)[0]
        assert words[5:10] == (*numbers[:4], plan)
        record = point.record()
        assert record["step_seconds"] == planning.best.seconds
        assert record["closed_form_seconds"] == planning.best.prediction.seconds
    steps = [(p.record()["step_seconds"], p.record()["closed_form_seconds"]) for p in points]
    assert any(simulated != closed for simulated, closed in steps)  # else nothing was told apart
    assert "simulated" in page(points, "t")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_of_plan(objective: Objective, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    words = ("qwen3-0.6b", "--cluster", "h100", "--devices", "16", "--global-batch", "32")
    done = run(*words, "--objective", objective, "--json", str(file))
    assert done.exit_code == 0, done.output
    planning = planned(Wanted("qwen3-0.6b", "h100", 16, None, 32, objective))
    [record] = json.loads(file.read_text())
    assert (record["devices"], record["used_devices"]) == (16, planning.job.devices)
    assert record["step_seconds"] == planning.best.seconds
    fewer = planning.job.devices < 16
    assert fewer == (objective == "cost") and fewer == (f"{planning.job.devices} of 16" in done.output)


def test_forms_agree() -> None:
    points = sweep([job("qwen3-0.6b", devices=n) for n in (8, 16, 32)])
    lines, records = list(csv.DictReader(io.StringIO(to_csv(points)))), json.loads(points_json(points))
    assert [set(row) for row in lines] == [set(SWEEP_COLUMNS)] * 3
    for row, record in zip(lines, records, strict=True):
        assert float(row["step_seconds"]) == record["step_seconds"]
        assert row["plan"] == record["plan"]
    text = page(points, "a <title>")
    assert text.count("<polyline") == 4 and text.count("<circle") == 12
    assert "a &lt;title&gt;" in text and "http://" not in text
    cells = re.findall(r"<t[hd] [^>]*>([^<]*)<", text)
    assert [tuple(cells[i : i + len(TITLES)]) for i in range(0, len(cells), len(TITLES))] == [
        TITLES,
        *point_rows(points),
    ]
    assert not re.search(r"\de[+-]\d", text)


def test_notes_of_plan_are_marked_and_listed_once() -> None:
    large = [job("qwen3-0.6b", devices=16384, seq=s, batch=16384) for s in (1024, 2048)]
    usual = Limits(fixed=(("schedule", "1f1b"),))  # other schedules have a note of their own
    points = sweep([job(), *large], limits=usual)
    notes = noted(points)
    assert points[0].notes == () and len(notes) == 1 and "consistency-checked, not validated" in notes[0]
    assert [p.notes for p in points[1:]] == [plan_job(one, limits=usual).warnings for one in large]
    assert [row[-1] for row in point_rows(points)] == ["", "1", "1"]
    assert page(points, "t").count(notes[0]) == 1
    assert [r["notes"] for r in json.loads(points_json(points))] == [[], notes, notes]
    words = ("qwen3-0.6b", "--cluster", "h100", "--devices", "16384", "--seq", "1024,2048")
    words += ("--fix", "schedule=1f1b")
    assert run(*words).output.count("consistency-checked, not validated") == 1


def test_the_legend_names_every_line() -> None:
    models, clusters = ("qwen3-0.6b", "qwen3-1.7b"), ("h100", "a100")
    points = sweep([job(model, cluster) for model in models for cluster in clusters])
    points += sweep([job("qwen3-0.6b", devices=16), job("qwen3-0.6b", "a100", devices=16)])
    names = list(series(points))
    assert names == ["qwen3-0.6b, h100", "qwen3-0.6b, a100", "qwen3-1.7b, h100", "qwen3-1.7b, a100"]
    text = page(points, "t")
    assert all(legend(points).count(name) == text.count(name) == 1 for name in names)
    assert "flex-wrap" in text and "qwen3" not in plot(points, "mfu", "MFU")


def test_lines_look_different_when_colours_are_used_up() -> None:
    one = sweep([job()])[0]
    places = [{"model": f"m{i}", "devices": n} for i in range(20) for n in (8, 9)]
    points = [replace(one, asked={**one.asked, **place}) for place in places]
    for drawn in (legend(points), plot(points, "mfu", "MFU")):
        styles = re.findall(r"<polyline[^>]*(stroke=.*?)/>", drawn)
        assert len(styles) == len(set(styles)) == 20


def test_a_batch_that_follows_from_the_devices_makes_no_lines() -> None:
    points = sweep([job("qwen3-0.6b", devices=n, batch=4 * n) for n in (8, 16)])
    assert varied(points) == ["devices"] and page(points, "t").count("<polyline") == 4


def test_jobs_without_a_plan_are_told_not_dropped() -> None:
    odd = replace(job("gpt2-xl", devices=8, seq=1024), global_batch=7)
    points = sweep([tight(layers=24, capacity=3e9, devices=1, batch=1), odd, job()])
    assert [bool(p.planning) for p in points][0::2] == [False, True]
    assert points[0].missing.startswith("does not fit: ")
    assert page(points, "t").count(points[0].missing) == 1


def test_what_does_not_fit_says_by_how_much() -> None:
    def with_capacity(capacity: float) -> PlanningJob:
        return tight(layers=24, capacity=capacity, devices=1, batch=1)

    missing = point_of(with_capacity(3e9)).missing
    found = re.match(r"does not fit: ([\d.]+) (MB|GB) over", missing)
    assert found, missing
    over = float(found[1]) * {"MB": 1e6, "GB": 1e9}[found[2]]
    assert bytes_words(over) == f"{found[1]} {found[2]}"
    assert point_of(with_capacity(3e9 + 1.01 * over)).planning is not None  # said with three digits
    assert point_of(with_capacity(3e9 + 0.98 * over)).planning is None


def test_devices_that_one_machine_cannot_have_cost_only_its_points(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    words = ("qwen3-0.6b", "--cluster", "h100,cloudmatrix384", "--devices", "64,768", "--global-batch", "768")
    done = run(*words, "--json", str(file))
    assert done.exit_code == 0, done.output
    records: list[dict[str, Any]] = json.loads(file.read_text())
    assert [(r["cluster"], r["devices"]) for r in records if r["plan"]] == [
        ("h100", 64),
        ("h100", 768),
        ("cloudmatrix384", 64),
        ("cloudmatrix384", 768),
    ]
    done = run("qwen3-0.6b", "--cluster", "h100,cloudmatrix384", "--devices", "1024", "--json", str(file))
    assert done.exit_code == 0, done.output
    records = json.loads(file.read_text())
    assert [bool(r["plan"]) for r in records] == [True, False]
    assert records[1]["missing"] == "not with 1,024 devices; 768 or 1536 would do"
    assert records[1]["missing"] in done.output


def test_only_a_sweep_without_any_plan_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    wrong = run("qwen3-0.6b", "--cluster", "cloudmatrix384", "--devices", "1000,1024", "--json", str(file))
    assert wrong.exit_code == 2 and "devices: got 1000" in wrong.stderr and not file.exists()
    assert "not with 1,024 devices" in wrong.stdout
    large = run("llama3.1-405b", "--cluster", "h100", "--devices", "1,8")
    assert large.exit_code == 2 and "does not fit" in large.stdout and "host memory" in large.stderr
    unknown = run("qwen3-0.6b", "--cluster", "h100,h1000", "--devices", "8")
    assert unknown.exit_code == 2 and "h1000" in unknown.stderr


def test_rows_without_a_plan_name_a_machine_as_the_others_do(tmp_path: Path) -> None:
    machine, file = tmp_path / "own.yaml", tmp_path / "s.json"
    machine.write_text(cluster_yaml(replace(job("qwen3-0.6b", "cloudmatrix384", 768).cluster, name="mine")))
    done = run("qwen3-0.6b", "--cluster", str(machine), "--devices", "64,1024", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert [r["cluster"] for r in json.loads(file.read_text())] == ["mine", "mine"]


def test_a_dtype_of_some_machines_costs_only_the_others() -> None:
    done = run("qwen3-0.6b", "--cluster", "h100,a100", "--devices", "8", "--dtype", "fp8")
    assert done.exit_code == 0 and "not in fp8" in done.output and "of the fp8 peak" in done.output


def test_command_line(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("s.html", "s.csv", "s.json")]
    words = ["qwen3-0.6b,qwen3-1.7b", "--cluster", "h100", "--devices", "8,16"]
    words += ["--html", str(files[0]), "--csv", str(files[1]), "--json", str(files[2])]
    done = run(*words, "--global-batch", "32")
    assert done.exit_code == 0, done.output
    assert len(json.loads(files[2].read_text())) == 4
    assert len(files[1].read_text().splitlines()) == 5
    assert files[0].read_text().count("<polyline") == 8 + 2  # two lines in each plot and in the legend


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


def test_a_fixed_size_that_a_machine_cannot_have_costs_its_own_points() -> None:
    values = {"model": ["llama3.1-8b"], "cluster": ["h100"], "devices": [8, 64], "seq": [4096]}
    values["global_batch"] = [64]
    points = points_of(values, "bf16", "time", Limits(fixed=(("dp", 64),)))
    assert points[0].missing == "no dp=64; dp=8 would do"
    assert points[1].missing == "" and points[1].record()["step_seconds"] > 0
