"""Every script in `examples/` runs as its docstring says, in less than a minute on two cores."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SAYS = {
    "auto_step.py": r"chosen: .*\nlosses( \d+\.\d{4}){5}",
    "llama_two_weights.py": r"step 4: loss .*\ndown_proj .*Shard\(dim=1\)",
    "own_kernel.py": r"compared on 4 virtual ranks.*replicas agree",
    "own_op.py": r"compared on 4 virtual ranks.*replicas agree",
    "save_and_move.py": r"fourth step: .*\ntransformers reads \d+ parameters",
}


def command(name: str) -> list[str]:
    """How the docstring says to run a script."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8"))) or ""
    found = re.search(rf"^ +(python|torchrun)( .*)? examples/{name}$", text, re.M)
    assert found, f"examples/{name} does not say how to run it"
    program, options = found.group(1), (found.group(2) or "").split()
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    return [sys.executable, *(torchrun if program == "torchrun" else []), *options, f"examples/{name}"]


@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(name), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[name], done.stdout), done.stdout
