"""plan --cluster, as typed: answers without torch, writes what is asked, refuses in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hyperparallel.cli.__main__ import app
from hyperparallel.plan.plan import Plan
from hyperparallel.plan.simulate import read_trace

pytestmark = pytest.mark.pure
SMALL = ("--cluster", "h100", "--devices", "8", "--seq", "2048", "--global-batch", "16")


def _run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_prints_the_best_plans_and_why() -> None:
    done = _run("plan", "qwen3-0.6b", *SMALL, "--top", "3")
    assert done.exit_code == 0, done.output
    for word in ("tokens/s/device", "MFU", "memory", "exposed", "bubble", "why ", "second ", "searched "):
        assert word in done.output


def test_writes_what_is_asked(tmp_path: Path) -> None:
    files = {end: tmp_path / f"out.{end}" for end in ("html", "json", "yaml", "trace")}
    done = _run("plan", "qwen3-0.6b", *SMALL, "--runnable", "--html", str(files["html"]), "--json",
                str(files["json"]), "--save", str(files["yaml"]), "--trace", str(files["trace"]))  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(files["json"].read_text())
    plan = Plan.load(files["yaml"])
    assert plan.mesh.size == record["devices"] == 8
    assert "qwen3-0.6b on 8" in files["html"].read_text()
    step = read_trace(files["trace"]).step_seconds
    assert step == pytest.approx(record["plans"][0]["step_seconds"], rel=1e-3)
    each = record["plans"][0]["strategy"]
    assert f"train with {16 // (each['dp'] * each['microbatch'])} micro-batch" in done.output


def test_reads_a_cluster_file_and_a_model_folder(tmp_path: Path) -> None:
    from hyperparallel.cluster.presets import preset

    (tmp_path / "machine.yaml").write_text(preset("a100", 8).to_yaml())
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
              "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = _run("plan", str(tmp_path), "--cluster", str(tmp_path / "machine.yaml"), "--global-batch", "16")
    assert done.exit_code == 0, done.output
    assert "512 tokens" in done.output and "a100" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "qwen3-06", "--cluster", "h100"], "write qwen3-"),
        (["plan", "qwen3-0.6b", "--cluster", "h10"], "write h100"),
        (["plan", "qwen3-0.6b", "--cluster", "h100", "--devices", "63"], "write 56 or 64"),
        (["plan", "qwen3-0.6b", *SMALL, "--objective", "speed"], "time, memory, cost"),
        (["plan", "qwen3-0.6b", *SMALL, "--dtype", "fp4"], "fp8"),
        (["plan", "qwen3-0.6b", *SMALL, "--mesh", "dp=2"], "no --cluster"),
        (["plan", "qwen3-0.6b", "--devices", "8"], "--cluster h100 --devices 8"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tpp=2"], "write tp"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "zero=7"], "0, 1, 2 or 3"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp=3"], "sizes that were fixed"),
        (["plan", "qwen3-0.6b", *SMALL, "--save", "plan.txt"], "ending in .yaml"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "pp=2", "--save", "plan.yaml"], "--runnable"),
        (["plan", "qwen3-0.6b", "--cluster", "h100", "--seq", "-1"], "1 or more"),
        (["plan", "deepseek-v3", "--cluster", "h100", "--devices", "8"], "GB more than its"),
    ],
)
def test_mistakes_are_one_clear_line(words: list[str], said: str) -> None:
    done = _run(*words)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line


def test_plans_without_torch() -> None:
    script = (
        "import sys; from hyperparallel.cli.__main__ import app\n"
        f"app({['plan', 'qwen3-0.6b', *SMALL, '--runnable']!r}, standalone_mode=False)\n"
        "heavy = [m for m in ('torch', 'transformers') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
