"""plan --cluster, as typed: answers without torch, writes what is asked, refuses in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hyperparallel.cli.__main__ import app
from hyperparallel.cli.planning import Wanted, job_of
from hyperparallel.cluster.files import cluster_yaml
from hyperparallel.errors import UserError
from hyperparallel.plan.plan import Plan
from hyperparallel.simulate import read_trace

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
    count = 16 // (each["dp"] * each["microbatch"])
    assert f"train with accumulate={count}, batch_size=16" in done.output


def test_reads_a_cluster_file_and_a_model_folder(tmp_path: Path) -> None:
    from hyperparallel.cluster.presets import preset

    (tmp_path / "machine.yaml").write_text(cluster_yaml(preset("a100", 8)))
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
        (["plan", "qwen3-0.6b", "--cluster", "h100", "--devices", "1" + 15 * "0"], "at most 10,000,000"),
        (["plan", "qwen3-0.6b", *SMALL, "--objective", "tiem"], "write time instead"),
        (["plan", "qwen3-0.6b", "--cluster", "a100", "--dtype", "fp8"], "write bf16 instead"),
        (["plan", "qwen3-0.6b", "--cluster", "a100", "--dtype", "bfloat16"], "write bf16 instead"),
        (["plan", "qwen3-0.6b"], "write hyperparallel plan qwen3-0.6b --cluster h100 instead"),
        (["plan", "qwen3-0.6b", "--cluster", "README.md"], "README.md, line "),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tpp=2"], "write tp=2 instead"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp"], "write tp=2 instead"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp=2,"], "got nothing; allowed: field=value"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp=2,tp=4"], "tp only once"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp=two"], "a whole number after tp=; write tp=2"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp=0"], "write tp=2 instead"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "sp=yes"], "sp=true or sp=false"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "zero=7"], "zero of 1, 2, 3; write zero=3 instead"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "recompute=fulll"], "write recompute=full instead"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "recompute=selective"], "none, light, alternate, full"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp=3"], "tp of 1, 2, 4, 8 (divide 8 devices"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "dp=7"], "write dp=8 instead"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "pp=2", "--runnable"], "the executor runs today"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "tp=8,pp=4"], "sizes that were fixed"),
        (["plan", "qwen3-0.6b", *SMALL, "--save", "plan.txt"], "ending in .yaml"),
        (["plan", "qwen3-0.6b", *SMALL, "--fix", "pp=2", "--save", "plan.yaml"], "--runnable"),
        (["plan", "qwen3-0.6b", "--cluster", "h100", "--seq", "-1"], "a whole number of at least 1"),
        (["plan", "qwen3-0.6b", "--cluster", "h100", "--seq", "0"], "a whole number of at least 1"),
        (["plan", "qwen3-0.6b", "--cluster", "h100", "--global-batch", "0"], "write --global-batch 256"),
        (["plan", "deepseek-v3", "--cluster", "h100", "--devices", "8"], "GB more than its"),
    ],
)
def test_mistakes_are_one_clear_line(words: list[str], said: str) -> None:
    done = _run(*words)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "xyzzy", "--cluster", "h100"],
        ["plan", "qwen3-0.6b", "--cluster", ""],
        ["plan", "qwen3-0.6b", *SMALL, "--fix", "schedule=zigzag"],
        ["plan", "qwen3-0.6b", *SMALL, "--fix", "parts=norms"],
        ["plan", "qwen3-0.6b", *SMALL, "--objective", "xyzzy"],
    ],
)
def test_nothing_is_suggested_where_no_name_is_near(words: list[str]) -> None:
    done = _run(*words)
    assert done.exit_code == 2 and "allowed: " in done.stderr
    assert "instead" not in done.stderr


def test_a_plan_that_cannot_be_saved_keeps_no_other_file_from_being_written(tmp_path: Path) -> None:
    files = {end: tmp_path / f"out.{end}" for end in ("html", "json", "yaml", "trace")}
    done = _run("plan", "qwen3-0.6b", *SMALL, "--fix", "pp=2", "--html", str(files["html"]), "--json",
                str(files["json"]), "--save", str(files["yaml"]), "--trace", str(files["trace"]))  # fmt: skip
    assert done.exit_code == 2 and done.stderr.startswith("error: --save: ")
    assert [end for end, path in files.items() if path.exists()] == ["html", "json", "trace"]


def test_each_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below, good = str(tmp_path / "file" / "out"), tmp_path / "trace.json"
    done = _run("plan", "qwen3-0.6b", *SMALL, "--html", below, "--json", below, "--trace", str(good))
    assert done.exit_code == 2 and good.exists()
    assert [line.split(":")[1] for line in done.stderr.splitlines()] == [" --html", " --json"]


def test_a_wrong_cluster_file_is_refused(tmp_path: Path) -> None:
    from hyperparallel.cluster.presets import preset

    text = cluster_yaml(preset("h100", 16)).replace("bytes_s: 5.0e+10", "bytes_s: 400e9")
    (tmp_path / "m.yaml").write_text(text)
    done = _run("plan", "qwen3-0.6b", "--cluster", str(tmp_path / "m.yaml"))
    assert done.exit_code == 2 and "400 Gb/s is 50e9 bytes/s" in done.stderr


def test_a_machine_without_fabric_is_said_to_be_one_device(tmp_path: Path) -> None:
    from hyperparallel.cluster.presets import preset

    (tmp_path / "m.yaml").write_text(cluster_yaml(replace(preset("h100"), fabric=())))
    words = ("plan", "qwen3-0.6b", "--cluster", str(tmp_path / "m.yaml"), "--global-batch", "8")
    done = _run(*words)
    assert done.exit_code == 0 and "note: h100 has no fabric, so this plans one device" in done.output
    assert "fabric" not in _run(*words, "--devices", "1").output
    more = _run(*words, "--devices", "8")
    assert more.exit_code == 2 and "no fabric tier connects devices" in more.stderr


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["seq", "global_batch"])
def test_zero_is_not_taken_for_the_default(name: str, value: int) -> None:
    wanted = replace(Wanted("qwen3-0.6b", "h100"), **{name: value})
    with pytest.raises(UserError, match=rf"got {value}; allowed: a whole number of at least 1"):
        job_of(wanted)


def test_plans_without_torch() -> None:
    script = (
        "import sys; from hyperparallel.cli.__main__ import app\n"
        f"app({['plan', 'qwen3-0.6b', *SMALL, '--runnable']!r}, standalone_mode=False)\n"
        "heavy = [m for m in ('torch', 'transformers') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
