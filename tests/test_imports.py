"""Imports go one way, and the check that says so finds each kind of offence."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.imports import violations

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parent.parent / "hyperparallel"


def test_package_imports_go_one_way() -> None:
    assert violations(ROOT) == []


def offences(root: Path, files: dict[str, str]) -> list[str]:
    """What the check finds in a package of these files, by their path and text."""
    for file, source in files.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return violations(root)


@pytest.mark.parametrize(
    ("file", "source", "problem"),
    [
        ("layout/a.py", "import hyperparallel.planner.cost", "to its right"),
        ("layout/a.py", "from hyperparallel.plan import cost", "to its right"),
        ("layout/a.py", "from hyperparallel import plan", "to its right"),
        ("layout/a.py", "from ..plan import cost", "to its right"),
        ("shard/deep/a.py", "from ...graph import capture", "to its right"),
        ("errors.py", "from hyperparallel.layout import Mesh", "to its right"),
        ("cluster/a.py", "from hyperparallel.workload import Op", "sibling"),
        ("train/a.py", "def f():\n    import hyperparallel.serve", "sibling"),
        ("plan/a.py", "import torch", "left of the torch line"),
        ("plan/a.py", "def f():\n    import torch.fx", "left of the torch line"),
        ("plan/a.py", "import typing\nif typing.TYPE_CHECKING:\n    import torch", "left of"),
        ("cli/a.py", "import torch.nn", "inside the function"),
        ("recipes/a.py", "try:\n    from transformers import x\nfinally: pass", "inside the"),
        ("stray/a.py", "from hyperparallel.layout import Mesh", "no place"),
        ("plan/a.py", 'import importlib\nimportlib.import_module("hyperparallel.plan.b")', "by a string"),
        ("plan/a.py", '_late("hyperparallel.graph.derive")', "'hyperparallel.graph.derive' is named by"),
        ("plan/a.py", 'def f():\n    return __import__("hyperparallel.graph")', "by a string"),
        ("plan/a.py", 'from importlib import import_module\nimport_module(".graph", "x")', "by a string"),
        ("plan/a.py", 'import_module(f"hyperparallel.{name}")', "'hyperparallel.' is named by a string"),
        ("plan/a.py", 'import_module("hyperparallel." + name)', "by a string"),
        ("plan/a.py", 'TABLE = {"derive": "hyperparallel.graph.derive"}', "by a string"),
    ],
)
def test_offences_are_found(tmp_path: Path, file: str, source: str, problem: str) -> None:
    (found,) = offences(tmp_path, {file: source})
    assert problem in found and file in found


@pytest.mark.parametrize(
    ("files", "ring"),
    [
        (
            {"layout/a.py": "from hyperparallel.layout.b import f",
             "layout/b.py": "def f():\n    from hyperparallel.layout import a"},
            "a.py -> b.py -> a.py",
        ),
        (
            {"layout/a.py": "import typing as t\nif t.TYPE_CHECKING:\n    from hyperparallel.layout import b",
             "layout/b.py": "from hyperparallel.layout.c import C",
             "layout/c.py": "from .a import A"},
            "a.py -> b.py -> c.py -> a.py",
        ),
        (
            {"layout/__init__.py": "from hyperparallel.layout.a import A",
             "layout/a.py": "from hyperparallel.layout import B"},
            "__init__.py -> a.py -> __init__.py",
        ),
        (  # two rooms of a package, though no two files import each other
            {"graph/capture/a.py": "from hyperparallel.graph.passes.b import f",
             "graph/capture/c.py": "",
             "graph/passes/b.py": "",
             "graph/passes/d.py": "import hyperparallel.graph.capture.c"},
            "capture -> passes -> capture",
        ),
        (
            {"graph/build.py": "from hyperparallel.graph.passes.b import f",
             "graph/passes/b.py": "def f():\n    from hyperparallel.graph import build"},
            "build.py -> passes -> build.py",
        ),
        (
            {"graph/passes/exact/a.py": "from hyperparallel.graph.passes.b import f",
             "graph/passes/exact/c.py": "",
             "graph/passes/b.py": "from hyperparallel.graph.passes.exact.c import g"},
            "b.py -> exact -> b.py",
        ),
    ],
)  # fmt: skip
def test_rings_are_found(tmp_path: Path, files: dict[str, str], ring: str) -> None:
    (found,) = offences(tmp_path, files)
    assert f"{ring} is a ring" in found
    assert all(f"{file} imports" in found for file, source in files.items() if "import" in source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("plan/a.py", "from hyperparallel.shard import rule\nfrom . import b"),
        ("graph/a.py", "import torch\nfrom hyperparallel.plan import Plan"),
        ("cli/a.py", "def f():\n    import torch"),
        ("cli/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("layout/a.py", "from hyperparallel import __version__\nimport torchlike"),
        ("__init__.py", "from hyperparallel.layout import Mesh"),
        ("__init__.py", 'import importlib\nTABLE = {"Mesh": "hyperparallel.layout"}'),
        ("recipes/find.py", "import importlib\nimportlib.import_module(module)"),
        ("cli/a.py", 'import importlib.metadata\nimportlib.metadata.version("hyperparallel")'),
        ("cli/a.py", '"""See `hyperparallel.layout`."""\nWORDS = "hyperparallel.words"'),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str) -> None:
    assert offences(tmp_path, {file: source}) == []


def test_files_of_one_package_may_import_each_other_one_way(tmp_path: Path) -> None:
    files = {
        "layout/__init__.py": "from hyperparallel.layout.a import A\nfrom hyperparallel.layout.b import B",
        "layout/a.py": "from hyperparallel.layout.b import B\nfrom hyperparallel.layout.deep.c import C",
        "layout/b.py": "",
        "layout/deep/c.py": "from hyperparallel.layout.deep import d",
        "layout/deep/d.py": "from hyperparallel.layout.b import B",
    }
    assert offences(tmp_path, files) == []
