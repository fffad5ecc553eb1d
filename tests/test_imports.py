"""Imports go one way, and the check that says so finds each kind of offence."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.imports import violations

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parent.parent / "hyperparallel"


def test_package_imports_go_one_way() -> None:
    assert violations(ROOT) == []


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
    ],
)
def test_offences_are_found(tmp_path: Path, file: str, source: str, problem: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (found,) = violations(tmp_path)
    assert problem in found and file in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("plan/a.py", "from hyperparallel.shard import rule\nfrom . import b"),
        ("graph/a.py", "import torch\nfrom hyperparallel.plan import Plan"),
        ("cli/a.py", "def f():\n    import torch"),
        ("cli/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("layout/a.py", "from hyperparallel import __version__\nimport torchlike"),
        ("__init__.py", "from hyperparallel.layout import Mesh"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert violations(tmp_path) == []
