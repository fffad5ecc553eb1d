"""The table of docs/extending.md: its files exist, and its lists know all things of a kind."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hyperparallel.cluster.presets import PRESETS

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hyperparallel"
MOST = {"an op rule": 3, "a collective": 6, "a pass": 3, "a pipeline schedule": 2, "a cluster preset": 2,
        "a checkpoint format": 2}  # fmt: skip
"""The files that adding one may touch, at most (tests of its own apart)."""


def table() -> list[tuple[str, str, str]]:
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| a")]
    return [(what.strip(), change, files.strip()) for what, change, files in rows]


def test_every_file_and_folder_of_the_table_exists() -> None:
    for what, change, _ in table():
        folder = PACKAGE
        for name in re.findall(r"`([\w./]+)`", change):
            path = (ROOT if name.startswith(("hyperparallel/", "tests/")) else folder) / name
            if not path.exists() and (folder.parent / name).exists():
                path = folder.parent / name
            if path.exists():
                folder = path if path.is_dir() else path.parent
            elif "." in name or "/" in name:
                pytest.fail(f"{what}: no {name}")


def test_no_row_needs_more_files_than_a_newcomer_should_touch() -> None:
    said = {what: int(files.split(" to ")[-1]) for what, _, files in table()}
    for what, most in MOST.items():
        (row,) = (count for name, count in said.items() if name.startswith(what))
        assert row <= most, what


def names_in(path: Path) -> set[str]:
    """All names, attributes and imported modules that a file mentions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {part for alias in node.names for part in alias.name.split(".")}
            found |= set((getattr(node, "module", "") or "").split("."))
    return found


@pytest.mark.parametrize(
    ("folder", "place", "apart"),
    [
        ("shard/rules", "shard/rules/table.py", {"table", "rule", "notation", "operands"}),
        ("graph/local", "graph/local/localise.py", {"localise", "local_op"}),
        ("graph/passes/peephole", "graph/passes/peephole/sweeps.py", {"sweeps", "rewrite"}),
        ("cluster/presets", "cluster/presets/__init__.py", set()),
        ("workload/families", "workload/hf_config.py", {"fields"}),
    ],
)  # fmt: skip
def test_each_file_of_a_family_is_known_where_the_family_is_listed(
    folder: str, place: str, apart: set[str]
) -> None:
    known = names_in(PACKAGE / place)
    files = {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"} - apart
    assert files - known == set()


def test_each_pass_is_in_the_list_or_called_by_one_that_is() -> None:
    passes = {path.stem: names_in(path) for path in (PACKAGE / "graph/passes").glob("*.py")}
    reached, todo = set(), ["build"]
    passes["build"] = names_in(PACKAGE / "graph/build.py")
    while todo:
        fresh = (passes[todo.pop()] & passes.keys()) - reached
        reached |= fresh
        todo += fresh
    # What capture does to a fresh graph, and what is done when a program is made callable.
    callers = [*(PACKAGE / "graph/capture").glob("*.py"), *(PACKAGE / "runtime/exec").glob("*.py")]
    elsewhere = {name for path in callers for name in names_in(path)}
    assert passes.keys() - reached - elsewhere - {"__init__", "build"} == set()


def test_each_preset_function_is_listed() -> None:
    made = {function.__name__ for function in PRESETS.values()}
    for path in (PACKAGE / "cluster/presets").glob("[a-z]*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            returns = isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(None))
            if returns == "Cluster" and not node.name.startswith("_") and not node.args.args:
                assert node.name in made, f"{path.name}: {node.name}"


def test_each_command_is_registered() -> None:
    known = names_in(PACKAGE / "cli/__main__.py")
    for path in (PACKAGE / "cli").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.startswith('"""`hyperparallel ') and path.stem != "__init__":
            assert path.stem in known, path.name
