"""One name, one thing: a public class, function or constant of the package is defined once.

A name that means two things sends a reader to the wrong file. Names that stand twice on purpose are
listed below with the reason; an entry that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure
NamesOf = Callable[[ast.stmt], list[str]]
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

_FAMILY = "a table of each family; one table of all is made of them by its name"
CONSTANTS = {
    "RULES": f"{_FAMILY} (`shard/rules/table.py`)",
    "FACTS": f"{_FAMILY} (`shard/rules/table.py`)",
    "FORMS": f"{_FAMILY} (`graph/local/localise.py`)",
    "T": "a type variable",
}
"""Public constants that may be defined twice, each with the reason."""


def repeated(root: Path, names_of: NamesOf) -> dict[str, list[str]]:
    """Public names of module level that several files define, each with the files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name in names_of(node):
                if not name.startswith("_"):
                    places[name].append(str(path.relative_to(root)))
    # Overloads and versions of one file are one thing.
    return {name: files for name, files in places.items() if len(set(files)) > 1}


def class_names(node: ast.stmt) -> list[str]:
    return [node.name] if isinstance(node, ast.ClassDef) else []


def function_names(node: ast.stmt) -> list[str]:
    return [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []


def constant_names(node: ast.stmt) -> list[str]:
    """Names in upper case that a statement gives a value, several at once too."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [name for name in names if name.isupper()]


@pytest.mark.parametrize(
    ("names_of", "allowed"),
    [(class_names, CLASSES), (function_names, FUNCTIONS), (constant_names, CONSTANTS)],
    ids=["classes", "functions", "constants"],
)
def test_a_public_name_is_defined_once(names_of: NamesOf, allowed: dict[str, str]) -> None:
    found = repeated(ROOT, names_of)
    assert {name: files for name, files in found.items() if name not in allowed} == {}
    assert set(allowed) <= set(found), "these are defined once by now: take them off the list"


def test_a_repeated_name_is_found(tmp_path: Path) -> None:
    classes = "class Task: ...\ndef place(): ...\ndef _own(): ...\n"
    (tmp_path / "a.py").write_text(classes + "KINDS = 1\nLEAST, MOST = 1, 2\nkinds = _MOST = 3\n")
    (tmp_path / "b.py").write_text(classes + "KINDS: int = 2\nMOST = 3\nkinds = _MOST = 3\nLEAST: int\n")
    twice = ["a.py", "b.py"]
    assert repeated(tmp_path, class_names) == {"Task": twice}
    assert repeated(tmp_path, function_names) == {"place": twice}
    assert repeated(tmp_path, constant_names) == {"KINDS": twice, "MOST": twice}
