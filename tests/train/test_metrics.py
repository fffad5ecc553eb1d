"""Where step records go: the JSON-lines file, TensorBoard, the progress line."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hyperparallel.train.metrics import (
    MetricsFile,
    StepRecord,
    TensorBoardFolder,
    peak_memory_bytes,
    read_metrics,
)
from hyperparallel.train.progress import ProgressLine

pytestmark = pytest.mark.fake

RECORD = StepRecord(0, 4.0, 1.0, 1e-3, 5000.0, 0.1, 1 << 20, 0.5, 0.5)


def write(path: Path, first: int, last: int, loss: float) -> None:
    sink = MetricsFile(path, first)
    for step in range(first, last):
        sink.write(replace(RECORD, step=step, loss=loss))
    sink.close()


def test_a_resumed_run_leaves_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, 0, 5, 1.0)
    with path.open("a") as out:
        out.write('{"step": 5, "lo')  # killed while writing
    write(path, 3, 7, 2.0)
    found = [(record["step"], record["loss"]) for record in read_metrics(path)]
    assert found == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 0, 5, 1.0)
    write(tmp_path / "m.jsonl", 0, 2, 2.0)
    assert [record["loss"] for record in read_metrics(tmp_path / "m.jsonl")] == [2.0, 2.0]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "m.jsonl")
    sink.write(replace(RECORD, loss=math.nan, grad_norm=math.inf))
    assert "NaN" not in (tmp_path / "m.jsonl").read_text()  # flushed, and plain JSON
    record = read_metrics(tmp_path / "m.jsonl")[0]
    assert record["loss"] is None and record["grad_norm"] is None
    sink.close()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        sink = TensorBoardFolder(tmp_path)
        for step in range(3):
            sink.write(replace(RECORD, step=step, loss=float(step)))
        sink.close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path))
        events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_plain_lines_are_few_and_the_last_step_is_always_shown() -> None:
    text = io.StringIO()
    line = ProgressLine(100, Console(file=text, width=40), every_seconds=60)
    for step in range(50):
        line.write(replace(RECORD, step=step))
    line.close()
    lines = text.getvalue().splitlines()
    assert [each.split("  ")[0] for each in lines] == ["step 1/100", "step 50/100"]
    assert "\x1b" not in text.getvalue()


def test_on_a_terminal_one_line_is_rewritten() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    line = ProgressLine(2, console)
    line.write(RECORD)
    line.write(replace(RECORD, step=1, comm_share=math.nan))
    line.close()
    assert "step 2/2" in text.getvalue() and text.getvalue().count("\n") <= 2


def test_memory_is_counted_in_bytes() -> None:
    assert 10 << 20 < peak_memory_bytes() < 1 << 40
