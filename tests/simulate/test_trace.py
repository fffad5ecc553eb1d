"""Trace files: the format's schema, round trips, other programs' files, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from hyperparallel.errors import TraceError
from hyperparallel.simulate import (
    Sample,
    Span,
    Task,
    Timeline,
    from_chrome_trace,
    read_trace,
    simulate,
    to_chrome_trace,
    write_trace,
)

pytestmark = pytest.mark.pure


class Event(BaseModel):
    """What all events of the Trace Event Format have."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    pid: int = Field(ge=0)


class Complete(Event):
    ph: Literal["X"]
    cat: str
    tid: int = Field(ge=0)
    ts: float
    dur: float = Field(ge=0)


class Counter(Event):
    ph: Literal["C"]
    ts: float
    args: dict[str, float]


class Metadata(Event):
    ph: Literal["M"]
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    tid: int = Field(ge=0)
    args: dict[Literal["name", "sort_index"], str | int]


class Trace(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]
    traceEvents: list[Annotated[Complete | Counter | Metadata, Field(discriminator="ph")]]


SCHEMA = TypeAdapter(Trace)


def example() -> Timeline:
    tasks = [
        Task("mm", 0, "compute", 1e-3, kind="matmul", alloc_bytes=10.0),
        Task("ar", 0, "comm.tp", 5e-4, needs=[0], kind="all_reduce", free_bytes=4.0),
        Task("mm", 3, "compute", 2e-3, kind="matmul"),
    ]
    timeline = simulate(tasks)
    return Timeline(timeline.spans, timeline.memory, facts={"model": "tiny"})


def test_traces_have_the_form_that_viewers_open() -> None:
    trace = SCHEMA.validate_json(to_chrome_trace(example()))
    complete = [event for event in trace.traceEvents if isinstance(event, Complete)]
    assert [(e.name, e.cat, e.pid, e.tid, e.ts, e.dur) for e in complete] == [
        ("mm", "matmul", 0, 0, 0.0, 1000.0),
        ("ar", "all_reduce", 0, 1, 1000.0, 500.0),
        ("mm", "matmul", 3, 0, 0.0, 2000.0),
    ]
    threads = {(e.pid, e.tid): e.args["name"] for e in trace.traceEvents
               if isinstance(e, Metadata) and e.name == "thread_name"}  # fmt: skip
    assert threads == {(0, 0): "compute", (0, 1): "comm.tp", (3, 0): "compute"}
    assert trace.otherData == {"source": "simulated", "model": "tiny"}


def test_the_schema_refuses_what_is_no_trace() -> None:
    record = json.loads(to_chrome_trace(example()))
    record["traceEvents"][-1].pop("ts")
    with pytest.raises(ValueError, match="ts"):
        SCHEMA.validate_json(json.dumps(record))


def test_files_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    write_trace(example(), path)
    assert read_trace(path) == example()


microseconds = st.integers(0, 10**9).map(lambda n: n / 1e3)
spans = st.builds(
    lambda name, rank, stream, kind, begin, lasts: Span(
        name, rank, stream, kind, begin / 1e6, (begin + lasts) / 1e6
    ),
    st.text(max_size=8),
    st.integers(0, 5),
    st.text(min_size=1, max_size=8),
    st.sampled_from(["matmul", "wait"]),
    microseconds,
    microseconds,
)


@given(st.lists(spans, min_size=1, max_size=8), st.integers(0, 3), microseconds)
def test_what_was_read_is_written_alike(found: list[Span], rank: int, at: float) -> None:
    memory = {rank: (Sample(at / 1e6, 7.0),)}
    timeline = Timeline(tuple(found), memory, "measured", {"plan": "x"})
    text = to_chrome_trace(timeline)
    SCHEMA.validate_json(text)
    again = from_chrome_trace(text)
    assert to_chrome_trace(again) == text
    assert [s[:4] for s in again.spans] == [s[:4] for s in timeline.spans]
    assert again.facts == timeline.facts and again.source == "measured"
    for ours, theirs in zip(again.spans, timeline.spans, strict=True):
        assert ours[4:] == pytest.approx(theirs[4:], abs=2e-9)  # three decimals of a microsecond


def test_other_programs_traces() -> None:
    events: list[Any] = [
        {"ph": "X", "name": "k", "pid": 1, "tid": 7, "ts": 3, "dur": 2, "args": {"grid": [1]}},
        {"ph": "i", "name": "mark", "pid": "x", "ts": 0},
        {"ph": "s", "id": 1, "pid": 1, "tid": 7, "ts": 3},
    ]
    for text in (json.dumps(events), json.dumps({"traceEvents": events})):
        (span,) = from_chrome_trace(text).spans
        assert span[:4] == ("k", 1, "thread 7", "other")
        assert (span.begin, span.end) == pytest.approx((3e-6, 5e-6))


def event(**changes: Any) -> str:
    whole = {"ph": "X", "name": "k", "pid": 1, "tid": 7, "ts": 3.0, "dur": 2.0} | changes
    return json.dumps({"traceEvents": [{k: v for k, v in whole.items() if v is not None}]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON in the Chrome trace event format"),
        ("3", "traceEvents"),
        ('{"traceEvents": 3}', "traceEvents"),
        ('{"traceEvents": []}', "at least one complete event"),
        (event(ts=None), 'a number "ts"'),
        (event(dur="2"), 'a number "dur"'),
        (event(dur=-1.0), "a dur of 0 or more"),
        (event(ts=float("nan")), 'a number "ts"'),
        (event(pid="main"), "pid is a rank"),
    ],
)
def test_damaged_traces(text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        from_chrome_trace(text)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="can be read"):
        read_trace(tmp_path / "binary")
    with pytest.raises(TraceError, match="can be written"):
        write_trace(example(), tmp_path / "binary" / "trace.json")
