"""One name, one thing: a public class or function of the package is defined once.

A name that means two things sends a reader to the wrong file. Names that stand twice on purpose are
listed below with the reason; an entry that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parent.parent / "hyperparallel"

CLASSES: dict[str, str] = {}
"""Public classes that may be defined twice, each with the reason."""

_COMMAND = "a command of the command line is called like the function that it runs"
_VERB = "a collective's node in a graph, and the function that does it at run time"
FUNCTIONS = {
    "wait": _VERB,
    "compare": _COMMAND,
    "sweep": _COMMAND,
    "train": _COMMAND,
    "main": "the start of `python -m hyperparallel`, and of the command line below it",
}
"""Public functions that may be defined twice, each with the reason."""


def repeated(root: Path, kinds: type | tuple[type, ...]) -> dict[str, list[str]]:
    """Public names of module level that several files define, each with the files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):  # type: ignore[attr-defined]
                places[node.name].append(str(path.relative_to(root)))  # type: ignore[attr-defined]
    # Overloads and versions of one file are one thing.
    return {name: files for name, files in places.items() if len(set(files)) > 1}


@pytest.mark.parametrize(
    ("kinds", "allowed"),
    [(ast.ClassDef, CLASSES), ((ast.FunctionDef, ast.AsyncFunctionDef), FUNCTIONS)],
    ids=["classes", "functions"],
)
def test_a_public_name_is_defined_once(kinds: type, allowed: dict[str, str]) -> None:
    found = repeated(ROOT, kinds)
    assert {name: files for name, files in found.items() if name not in allowed} == {}
    assert set(allowed) <= set(found), "these are defined once by now: take them off the list"


def test_a_repeated_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Task: ...\ndef place(): ...\ndef _own(): ...\n")
    (tmp_path / "b.py").write_text("class Task: ...\ndef place(): ...\ndef _own(): ...\n")
    assert repeated(tmp_path, ast.ClassDef) == {"Task": ["a.py", "b.py"]}
    assert repeated(tmp_path, ast.FunctionDef) == {"place": ["a.py", "b.py"]}
