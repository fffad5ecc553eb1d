"""plan and show, as typed: what is printed, what is saved, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hyperparallel.cli.__main__ import app
from hyperparallel.plan.derived import Derived
from hyperparallel.plan.plan import Plan
from tests.plan.sample import llama

TINY = "tests.cli.tiny:tiny"


def _run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.fake
def test_plan_prints_and_saves_what_show_reads(tmp_path: Path) -> None:
    saved, declared, page = (str(tmp_path / f"p.{end}") for end in ("json", "yaml", "html"))
    done = _run("plan", TINY, "--mesh", "dp=2,tp=2", "--save", saved, "--html", page)
    assert done.exit_code == 0, done.output
    assert "model.layers.*.mlp.up_proj.weight [x2]" in done.output
    derived = Derived.from_json(Path(saved).read_text())
    assert derived.num_ranks == 4 and len(derived.params) == 21
    assert "up_proj" in Path(page).read_text()

    shown = _run("show", saved)
    assert shown.exit_code == 0
    assert shown.output in done.output  # the same tables

    assert _run("plan", TINY, "--mesh", "dp=2,tp=2", "--save", declared).exit_code == 0
    again = _run("plan", TINY, "--plan", declared, "--save", str(tmp_path / "q.json"))
    assert again.exit_code == 0, again.output
    assert Plan.load(declared).mesh.shape == (2, 2)
    assert Derived.from_json((tmp_path / "q.json").read_text()) == derived


@pytest.mark.fake
def test_overrides_reach_the_model() -> None:
    done = _run("plan", TINY, "vocab_size=400", "dtype=bfloat16")
    assert "400 x 32" in done.output, done.output


@pytest.mark.pure
def test_show_explains_and_draws_a_saved_plan(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(llama().to_json())
    said = _run("show", str(saved), "--explain", "lm_head.weight")
    assert said.exit_code == 0 and "used: dim 0 in 2 by tp" in said.output
    drawn = _run("show", str(saved), "--html", str(tmp_path / "sub" / "page.html"))
    assert drawn.exit_code == 0
    assert "<title>plan</title>" in (tmp_path / "sub" / "page.html").read_text()


@pytest.mark.fake
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "lama_demo"], "write llama_demo instead"),
        (["plan", TINY, "--mesh", "dp:2"], "write dp=2,tp=2 instead"),
        (["plan", TINY, "--mesh", "dp=2,dp=2"], "dp"),
        (["plan", TINY, "--plan", "nowhere.yaml"], "readable plan file"),
        (["plan", TINY, "--save", "plan.txt"], "ending in .json"),
        (["plan", TINY, "--save", "/proc/nowhere/plan.json"], "can be written"),
        (["plan", TINY, "sequence=3"], "seq_len"),
        (["plan", TINY, "steps=none"], "steps"),
        (["plan", TINY, "steps"], "key=value"),
        (["plan", "tests.cli.tiny:nothing"], "a function of tests.cli.tiny"),
        (["plan", "tests.cli.nothing:tiny"], "can be imported"),
        (["plan", "tests.cli.tiny:not_a_recipe"], "returns a hyperparallel.recipes.Recipe"),
        (["plan", "tests"], "readable config.json"),
        (["show", "nowhere.json"], "readable file"),
        (["show", "pyproject.json"], "readable file"),
        (["train", TINY, "--mesh", "dp=2", "--devices", "3"], "--devices 2"),
        (["train", TINY, "--steps", "3", "steps=4"], "steps only once"),
        (["train", TINY, "--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes_are_one_clear_line(words: list[str], said: str) -> None:
    done = _run(*words)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.pure
@pytest.mark.parametrize("text", ['{"model": "llama3.1-8b",\n "plans": []}', "no JSON", "\0"])
def test_show_names_the_file_that_is_no_program(tmp_path: Path, text: str) -> None:
    file = tmp_path / "numbers.json"
    file.write_text(text)
    done = _run("show", str(file))
    (line,) = done.stderr.strip().splitlines()
    assert done.exit_code == 2 and f"got '{file}'" in line and "--save FILE.json" in line


@pytest.mark.pure
@pytest.mark.parametrize("command", ["show", "plan", "train"])
def test_a_plan_file_in_place_of_a_model_is_told_where_it_goes(tmp_path: Path, command: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("mesh: {dp: 2}\n")
    done = _run(command, str(file))
    assert done.exit_code == 2
    assert f"write MODEL --plan {file} instead" in done.stderr and "show MODEL --plan FILE" in done.stderr


@pytest.mark.fake
def test_mesh_and_plan_file_must_agree(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("mesh: {dp: 2}\n")
    done = _run("plan", TINY, "--plan", str(file), "--mesh", "dp=4")
    assert done.exit_code == 2 and "the mesh of" in done.stderr


@pytest.mark.fake
def test_a_plan_that_matches_nothing_is_refused_with_near_names(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("mesh: {tp: 2}\nparams: {'*.upp_proj.weight': [tp, null]}\n")
    done = _run("plan", TINY, "--plan", str(file))
    assert done.exit_code == 2 and "up_proj.weight" in done.stderr
