"""train as typed: parity with one device, resume, mistakes, failures and Ctrl-C without orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from tests.cli.forked import ROOT, run_forked

pytestmark = pytest.mark.procs
TINY = "tests.cli.tiny:tiny"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"the {n} and the {n * n % 97} say hello.\n" for n in range(2000)))
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return os.environ | {"XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _train(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return run_forked(["train", *words], environment)


def test_losses_equal_one_device_and_files_are_written(
    text: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = [TINY, "--mesh", "dp=2,tp=2", "--data", str(text), "--run-folder", str(tmp_path)]
    done = _train(environment, *words, "--check", "dtype=float64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed: 4 steps" in done.stdout
    assert "model.layers.*.mlp.up_proj.weight [x2]" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "plan.json").read_text())["num_ranks"] == 4
    assert (tmp_path / "plan.html").exists()


def test_one_step_is_traced(text: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """The file has both ranks' spans, and compare reads it (a step is predicted well by itself)."""
    trace = tmp_path / "step.json"
    words = [TINY, "--mesh", "tp=2", "--data", str(text), "--run-folder", str(tmp_path / "run")]
    done = _train(environment, *words, "--trace", str(trace))
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {"matmul", "all_reduce", "wait", "clip", "update"} <= {event["cat"] for event in spans}
    compared = run_forked(["compare", str(trace), str(trace), "--within", "0.01"], environment)
    assert compared.returncode == 0 and "same order of actions" in compared.stdout


def test_mixed_precision_is_checked_against_one_device(
    text: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """And its checkpoints hold float32."""
    words = [TINY, "--mesh", "fsdp=2,tp=2", "--data", str(text), "--run-folder", str(tmp_path)]
    done = _train(environment, *words, "--compute", "bfloat16", "--check", "checkpoint_every=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed: 4 steps" in done.stdout and "(allowed 2e-02)" in done.stdout
    assert "computed in bfloat16; parameters and their gradients keep their dtype" in done.stdout
    record = json.loads((tmp_path / "plan.json").read_text())
    assert "compute: bfloat16" in record["plan"]
    moved = {(item["kind"], item["dtype"]) for item in record["communications"]}
    assert ("all_gather", "bfloat16") in moved and ("reduce_scatter", "bfloat16") not in moved
    assert json.loads((tmp_path / "config.json").read_text())["compute"] == "bfloat16"
    saved = Checkpointer(tmp_path / "checkpoints").read_index().tensors
    kept = {entry.dtype for name, entry in saved.items() if name.startswith(("model/", "optimizer/"))}
    assert kept == {"float32"}


@pytest.mark.parametrize("words", [["--compute", "fp16"], ["compute=bfloat16", "dtype=float64"]])
def test_other_computes_are_refused_in_one_line(
    words: list[str], text: Path, environment: dict[str, str]
) -> None:
    done = _train(environment, TINY, "--mesh", "dp=2", "--data", str(text), *words)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "compute: got" in done.stderr, done.stderr


def test_an_old_run_folder_is_resumed(text: Path, environment: dict[str, str], tmp_path: Path) -> None:
    words = [TINY, "--mesh", "dp=2", "--data", str(text), "--run-folder", str(tmp_path)]
    words += ["checkpoint_every=2", "schedule=constant"]
    first = _train(environment, *words, "--steps", "2")
    assert first.returncode == 0, first.stderr
    second = _train(environment, *words, "--steps", "4", "--check")
    assert second.returncode == 0, second.stderr
    assert "steps 3 to 4" in second.stdout and "check left out" in second.stdout


def test_ranks_of_torchrun_are_used(text: Path, environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "hyperparallel"]
    command += ["train", TINY, "--mesh", "dp=2", "--data", str(text), "--run-folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("steps 1 to 4") == 1  # rank 0 alone talks


def test_a_failing_rank_is_reported(text: Path, environment: dict[str, str]) -> None:
    words = ["tests.cli.tiny:failing", "--mesh", "dp=2", "--data", str(text)]
    done = _train(environment, *words, f"run_folder={text.parent / 'failing'}")
    assert done.returncode == 1
    assert "run failed:" in done.stderr and "this model is broken" in done.stderr


@pytest.fixture
def endless(text: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has begun its steps."""
    words = [TINY, "--mesh", "dp=2", "--data", str(text), "--run-folder", str(tmp_path)]
    words += ["--steps", "1000000"]
    with subprocess.Popen(
        [sys.executable, "-m", "hyperparallel", "train", *words], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert any(line.startswith("step ") for line in process.stdout)
        yield process
        process.kill()


def test_ctrl_c_ends_every_rank(endless: subprocess.Popen[str]) -> None:
    ranks = _children(endless.pid)
    assert len(ranks) == 2
    os.killpg(endless.pid, signal.SIGINT)  # as the terminal does
    began = time.monotonic()
    endless.communicate(timeout=30)
    assert endless.returncode == 130
    assert time.monotonic() - began < 10
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found
