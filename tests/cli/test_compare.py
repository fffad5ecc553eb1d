"""compare as typed: tables, JSON, the verdict of --within, and files that are no traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperparallel.cli.__main__ import app
from hyperparallel.simulate import Span, Timeline, write_trace

pytestmark = pytest.mark.pure


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = []
    for name, seconds in (("predicted", 1.1e-3), ("measured", 1e-3)):
        spans = (
            Span("mm", 0, "compute", "matmul", 0.0, seconds),
            Span("ar", 0, "comm.tp", "all_reduce", 0.0, 5e-4),
        )
        paths.append(str(tmp_path / f"{name}.json"))
        write_trace(Timeline(spans, source=name), Path(paths[-1]))
    return paths


def test_tables(files: list[str]) -> None:
    done = CliRunner().invoke(app, ["compare", *files])
    assert done.exit_code == 0
    lines = [line.split() for line in done.output.splitlines()]
    assert ["step", "1.1", "ms", "1", "ms", "+10.0%"] in lines
    assert ["matmul", "1.1", "ms", "1", "ms", "+10.0%"] in lines
    assert ["masking", "ratio", "100.0%", "100.0%", "+0.0", "points"] in lines
    assert "same order of actions" in done.output


@pytest.mark.parametrize(("within", "status"), [("0.15", 0), ("0.05", 1)])
def test_verdict(files: list[str], within: str, status: int) -> None:
    done = CliRunner().invoke(app, ["compare", *files, "--within", within])
    assert done.exit_code == status
    assert ("NOT within 5%" in done.output) == bool(status)


def test_json(files: list[str]) -> None:
    done = CliRunner().invoke(app, ["compare", *files, "--json"])
    record = json.loads(done.output)
    assert record["summary"][0]["name"] == "step"
    assert record["summary"][0]["error"] == pytest.approx(0.1)
    assert {row["name"] for row in record["kinds"]} == {"matmul", "all_reduce"}


def test_no_trace(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    done = CliRunner().invoke(app, ["compare", files[0], str(tmp_path / "other.json")])
    assert done.exit_code == 2
    assert "traceEvents" in done.output and "Traceback" not in done.output
