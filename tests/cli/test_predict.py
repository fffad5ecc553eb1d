"""The whole way on this machine: describe it, predict a step, run the same step, compare them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hyperparallel.cli.__main__ import app
from hyperparallel.cluster.calibration import describe
from hyperparallel.cluster.files import cluster_yaml
from hyperparallel.runtime.calibrate import calibrate
from hyperparallel.simulate import read_trace

TINY = "tests.cli.tiny:tiny"


def _run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.procs
@pytest.mark.timeout(240)
def test_a_predicted_step_is_the_measured_one_on_another_clock(tmp_path: Path) -> None:
    """Same actions in the same order. Times only within a factor: a busy machine is no clock."""
    work = calibrate.TimingSizes(
        stretch_s=0.002, kernel_s=0.0005, repeats=2, shapes=((64, 64, 64), (64, 64, 256)),
        counts=(2048, 16384), messages=(240, 24_000), disk_bytes=1 << 20, between_bytes=1 << 20,
    )  # fmt: skip
    timings = calibrate.measure(2, 2, 8e9, tmp_path, work, threads=1)
    cluster, text = tmp_path / "machine.yaml", tmp_path / "text.txt"
    cluster.write_text(cluster_yaml(describe(timings, "in a test")))
    text.write_text("a few words to learn from, again and again. " * 200)

    predicted, measured = tmp_path / "predicted.json", tmp_path / "measured.json"
    run = (TINY, "--mesh", "dp=1,tp=2")
    done = _run("plan", *run, "--cluster", cluster, "--trace", predicted)
    assert done.exit_code == 0 and "predicted step on laptop" in done.output, done.output
    done = _run("train", *run, "--data", text, "--trace", measured, "--run-folder", tmp_path / "run")
    assert done.exit_code == 0, done.output

    done = _run("compare", predicted, measured, "--json")
    found = json.loads(done.output)
    assert found["disorder"] == ""
    step = found["summary"][0]
    assert 0.02 < step["predicted"] / step["measured"] < 10, step
    kinds = {row["name"]: row["predicted"] for row in found["kinds"]}
    assert all(kinds[kind] > 0 for kind in ("matmul", "all_reduce", "update", "clip", "elementwise"))
    timeline = read_trace(predicted)
    assert timeline.ranks == (0, 1) and timeline.peak_bytes() > 0


@pytest.mark.fake
def test_a_mesh_is_simulated_on_any_cluster(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    done = _run("plan", TINY, "--mesh", "dp=2,tp=2", "--cluster", "h100", "--trace", trace)
    assert done.exit_code == 0 and "predicted step on h100" in done.output, done.output
    assert read_trace(trace).ranks == (0, 1, 2, 3)


@pytest.mark.fake
def test_too_small_a_cluster_is_refused(tmp_path: Path) -> None:
    done = _run("plan", TINY, "--mesh", "dp=16", "--cluster", "h100", "--trace", tmp_path / "step.json")
    assert done.exit_code == 2 and "the 16 devices" in done.stderr
