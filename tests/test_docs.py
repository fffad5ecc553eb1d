"""The documents are true: their Python runs, and what they name in backticks is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from checks.imports import LEVEL
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
WRITTEN = ("README.md", "CONTRIBUTING.md", "GLOSSARY.md", *DOCS)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def blocks(name: str) -> list[str]:
    return BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))


def run_text(rank: int, text: str) -> None:
    """Run one block as a script of one rank; its process group is there already."""
    text = text.replace("torch.distributed.init_process_group()\n", "")
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.procs
@pytest.mark.timeout(300)
def test_the_twenty_lines_run_on_four_ranks() -> None:
    """As they stand, with 3 steps for 100."""
    text = blocks("README.md")[0]
    short = text.replace("range(100)", "range(3)")
    assert short != text and "init_process_group()" in text
    run_ranks(4, run_text, short, timeout=280)


GIVEN = (
    "import torch\nimport torch.nn.functional as F\nfrom torch import nn\nimport hyperparallel as hp\n"
    'mesh = hp.Layout((1, 1), ("dp", "tp"))\n'
)
"""What an example in the text may take for granted."""
EXAMPLES = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name in WRITTEN
    for i, text in enumerate(blocks(name))
    if not (name == "README.md" and i == 0)
]


@pytest.mark.fake
@pytest.mark.parametrize(("name", "i"), EXAMPLES)
def test_an_example_runs(name: str, i: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(GIVEN + blocks(name)[i])
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"^[\w./*-]+\.(py|cpp|md|html|json|toml)$|^[\w./-]+/$")
NAME = re.compile(r"^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?$")
ELSEWHERE = {
    *("config.json", "tokenizer.json", "index.json", "plan.json", "plan.html", "step.json"),
    *("metrics.jsonl", "predicted.json", "train.py", ".metadata", "quantization_config.json"),
    *("torch/", "tokenizer_config.json"),
}
"""Files of other projects, and those that a run makes."""
PLANNED = {f"{name}/" for name in LEVEL if not (ROOT / "hyperparallel" / name).exists()}
"""Packages that have their place in the order of imports and nothing in it yet."""


def tree() -> tuple[set[str], set[str]]:
    """(files by every ending of their path, folders likewise)"""
    files, folders = set(), set()
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if parts[0].startswith(".") or "__pycache__" in parts:
            continue
        ends = {"/".join(parts[i:]) for i in range(len(parts))}
        (folders if path.is_dir() else files).update(ends)
    return files, folders


FILES, FOLDERS = tree()


def docstrings() -> dict[str, str]:
    found = {}
    for path in sorted((ROOT / "hyperparallel").rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if text:
            found[str(path.relative_to(ROOT))] = text
    return found


def missing_files(text: str) -> list[str]:
    """The quoted files and folders that are not there."""
    found = []
    for quoted in QUOTED.findall(text):
        word = quoted.split(":")[0] if "::" not in quoted else quoted
        if not FILE.match(word) or word in ELSEWHERE or "*" in word:
            continue
        if word.removeprefix("hyperparallel/") in PLANNED:
            continue
        known = word.rstrip("/") in FOLDERS if word.endswith("/") else word in FILES
        if not known:
            found.append(word)
    return found


@pytest.mark.pure
@pytest.mark.parametrize("name", WRITTEN)
def test_files_that_a_document_names_are_there(name: str) -> None:
    assert missing_files((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.pure
def test_files_that_docstrings_name_are_there() -> None:
    wrong = {name: found for name, text in docstrings().items() if (found := missing_files(text))}
    assert wrong == {}


def identifiers() -> set[str]:
    """Every name that the code itself uses, comments and texts left out."""
    found = set()
    for room in ("hyperparallel", "tests", "benchmarks", "checks", "examples"):
        for path in (ROOT / room).rglob("*.py"):
            with path.open("rb") as file:
                tokens = tokenize.tokenize(file.readline)
                found.update(token.string for token in tokens if token.type == tokenize.NAME)
    return found


IDENTIFIERS = identifiers() | {path.rsplit("/", 1)[-1].removesuffix(".py") for path in FILES | FOLDERS}


def missing_names(text: str) -> list[str]:
    """The quoted functions, classes and attributes that no code has."""
    found = []
    for word in QUOTED.findall(text):
        like_code = "_" in word or "." in word or word.endswith("()") or re.match(r"[A-Z][a-z]+[A-Z]", word)
        if NAME.match(word) and like_code and not FILE.match(word):
            found += [word for part in word.removesuffix("()").split(".") if part not in IDENTIFIERS]
    return sorted(set(found) - NAMED_ELSEWHERE)


NAMED_ELSEWHERE = {
    *("PIP_FLAGS", "ModelOutput", "ignore_index", "create_graph", "_class_name", "max_reserved"),
}
"""Names of other projects: of pip, transformers, torch, diffusers, torchtitan."""


@pytest.mark.pure
@pytest.mark.parametrize("name", WRITTEN)
def test_names_that_a_document_quotes_are_there(name: str) -> None:
    assert missing_names((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.pure
def test_names_that_docstrings_quote_are_there() -> None:
    wrong = {name: found for name, text in docstrings().items() if (found := missing_names(text))}
    assert wrong == {}
