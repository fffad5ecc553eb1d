"""Every parameter of every command changes what the command does, or is refused by its name, in every mode.

The parameters are read off the commands: a new one without an entry in `WORDS` fails here by its name.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyperparallel.cli import run as run_module
from hyperparallel.cli.__main__ import app
from hyperparallel.cli.request import Request
from hyperparallel.cluster.files import cluster_yaml
from hyperparallel.cluster.presets import preset
from hyperparallel.simulate.timeline import Span, Timeline
from hyperparallel.simulate.trace import write_trace
from tests.plan.sample import llama

TINY = "tests.cli.tiny:tiny"
COMMANDS = {one.callback.__name__: one.callback for one in app.registered_commands if one.callback}
FIXED = "tp=2"

WORDS: dict[str, dict[str, list[str]]] = {
    "plan": {
        "model": [],
        "fields": ["batch_size=8"],
        "mesh": ["--mesh", "dp=2,tp=2"],
        "plan": ["--plan", "declared.yaml"],
        "save": ["--save", "saved.yaml"],
        "html": ["--html", "page.html"],
        "cluster": ["--cluster", "machine.yaml"],
        "devices": ["--devices", "4"],
        "seq": ["--seq", "512"],
        "global_batch": ["--global-batch", "32"],
        "objective": ["--objective", "memory"],
        "dtype": ["--dtype", "fp16"],
        "top": ["--top", "2"],
        "runnable": ["--runnable"],
        "fix": ["--fix", FIXED],
        "as_json": ["--json", "numbers.json"],
        "trace": ["--trace", "step.json"],
    },
    "sweep": {
        "model": [],
        "cluster": [],
        "devices": ["--devices", "4"],
        "seq": ["--seq", "512"],
        "global_batch": ["--global-batch", "32"],
        "objective": ["--objective", "memory"],
        "dtype": ["--dtype", "fp16"],
        "runnable": ["--runnable"],
        "fix": ["--fix", FIXED],
        "html": ["--html", "page.html"],
        "csv": ["--csv", "rows.csv"],
        "as_json": ["--json", "rows.json"],
    },
    "show": {
        "model": [],
        "fields": ["batch_size=8"],
        "mesh": ["--mesh", "dp=2,tp=2"],
        "plan": ["--plan", "declared.yaml"],
        "html": ["--html", "page.html"],
        "explain": ["--explain", "lm_head.weight"],
    },
    "compare": {
        "predicted": [],
        "measured": [],
        "within": ["--within", "0.5"],
        "as_json": ["--json"],
    },
    "doctor": {"calibrate": ["--calibrate"], "ranks": ["--ranks", "2"]},
    "train": {
        "model": [],
        "fields": ["batch_size=8"],
        "devices": ["--devices", "2"],
        "mesh": ["--mesh", "tp=2"],
        "plan": ["--plan", "declared.yaml"],
        "data": ["--data", "text.txt"],
        "tokenizer": ["--tokenizer", "folder"],
        "steps": ["--steps", "3"],
        "run_folder": ["--run-folder", "there"],
        "compute": ["--compute", "bfloat16"],
        "trace": ["--trace", "step.json"],
        "check": ["--check"],
    },
}
"""What is typed for each parameter; [] for those that a command needs, which `OTHERS` varies."""

DERIVED = ["plan", TINY]
SMALL = ["qwen3-0.6b", "--cluster", "machine.yaml", "--global-batch", "16", "--seq", "1024"]
MODES = {
    "search": ["plan", *SMALL],
    "derive": DERIVED,
    "derive and simulate": [*DERIVED, "--mesh", "dp=2", "--trace", "traced.json"],
    "sweep": ["sweep", "deepseek-v2-lite", *SMALL[1:]],
    "show a recipe": ["show", TINY],
    "show a saved program": ["show", "derived.json"],
    "compare": ["compare", "one.json", "two.json"],
    "doctor": ["doctor"],
    "train": ["train", TINY],
}
"""Ways in which each command is used, and what is typed in each."""

OTHERS = {
    "search": {"qwen3-0.6b": "llama3.1-8b"},
    "derive": {TINY: "tests.cli.tiny:narrow"},
    "derive and simulate": {TINY: "tests.cli.tiny:narrow"},
    "sweep": {"deepseek-v2-lite": "llama3.1-8b", "machine.yaml": "a100"},
    "show a recipe": {TINY: "tests.cli.tiny:narrow"},
    "show a saved program": {"derived.json": "other.json"},
    "compare": {"two.json": "three.json"},
    "train": {TINY: "tests.cli.tiny:narrow"},
}
"""Other words for those that a mode needs."""

OTHER_NAMES = {"as_json": "--json", "fields": "override"}
CASES = [
    (mode, name) for mode, base in MODES.items() for name in inspect.signature(COMMANDS[base[0]]).parameters
]


def test_every_command_and_parameter_has_words() -> None:
    assert {base[0] for base in MODES.values()} == set(COMMANDS)
    for command, function in COMMANDS.items():
        assert set(WORDS[command]) == set(inspect.signature(function).parameters), command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the words name."""
    made = tmp_path_factory.mktemp("files")
    (made / "declared.yaml").write_text("mesh: {dp: 2}\nfsdp: dp\n")
    (made / "machine.yaml").write_text(cluster_yaml(preset("h100", 8)))
    (made / "derived.json").write_text(llama(2).to_json())
    (made / "other.json").write_text(llama(3).to_json())
    for name, seconds in (("one.json", 1.0), ("two.json", 1.5), ("three.json", 4.0)):
        write_trace(Timeline((Span("a", 0, "compute", "matmul", 0.0, seconds),)), made / name)
    return made


def seen(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """All that a command does: what it prints, how it ends, which files it leaves, what it would train."""
    asked: list[Any] = []

    def asked_to_run(request: Request, *, check: bool) -> None:
        asked.append((request.plan.to_yaml(), request.config, check))

    monkeypatch.setattr(run_module, "run", asked_to_run)
    timed = "hyperparallel.cli.doctor.diagnosis.calibrated"
    monkeypatch.setattr(timed, lambda ranks: [f"timed {ranks} ranks"])
    monkeypatch.chdir(folder)
    before = set(folder.iterdir())
    done = CliRunner().invoke(app, words)
    made = sorted(set(folder.iterdir()) - before)
    for path in made:
        path.unlink()
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output, done.stderr, [path.name for path in made], asked


_BASE: dict[str, Any] = {}


@pytest.mark.fake
@pytest.mark.parametrize(("mode", "name"), CASES)
def test_every_parameter_acts_or_is_refused(
    mode: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (mode, name) == ("derive", "cluster"):
        return  # that is the mode "search"
    base = MODES[mode]
    more = WORDS[base[0]][name]
    if more and more[0].startswith("--") and more[0] in base:
        return  # the mode itself types it
    if mode not in _BASE:
        _BASE[mode] = seen(base, folder, monkeypatch)
        assert _BASE[mode][0] == 0, _BASE[mode]
    changed = [*base, *more] if more else [OTHERS[mode].get(word, word) for word in base]
    status, *rest = seen(changed, folder, monkeypatch)
    option = OTHER_NAMES.get(name, "--" + name.replace("_", "-"))
    if status == 2:
        line = rest[1]
        assert line.startswith(f"error: {option}: got ") or line.startswith("error: KEY=VALUE: got "), line
    else:
        assert status == 0 and rest != list(_BASE[mode][1:]), f"{mode}: {option} changes nothing"
