"""The terminal's tables show every row in one line each when piped."""

from __future__ import annotations

import pytest

from hyperparallel.cli.tables import print_derived
from hyperparallel.plan.report import communication_rows, parameter_rows
from tests.plan.sample import llama

pytestmark = pytest.mark.pure


def test_every_row_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    derived = llama()
    print_derived(derived)
    printed = capsys.readouterr().out.splitlines()
    for row in parameter_rows(derived):
        assert any(row.title in line and row.layout in line for line in printed), row.title
    for moved in communication_rows(derived):
        assert any(moved.kind in line and moved.module in line for line in printed), moved
