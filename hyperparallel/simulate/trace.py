"""Timelines as files: the Chrome trace event format, which Perfetto and chrome://tracing open.

A span is a complete event (ph X): pid is the rank, tid the stream, ts and dur are microseconds with three
decimals, cat is the kind. Metadata events (ph M) name ranks and streams; memory is a counter (ph C).
Predicted and measured steps are written alike, so `compare.py` takes any two of them; other programs'
traces can be read too where their pid is a number, events of other phases are passed over.

Format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperparallel.errors import TraceError
from hyperparallel.simulate.timeline import Sample, Span, Timeline, is_compute

MICRO = 1e6
MEMORY = "memory"


def to_chrome_trace(timeline: Timeline) -> str:
    """The JSON text of a timeline.

    >>> text = to_chrome_trace(Timeline((Span("mm", 0, "compute", "matmul", 0.0, 2e-6),)))
    >>> json.loads(text)["traceEvents"][-1] == {
    ...     "name": "mm", "cat": "matmul", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2.0}
    True
    """
    names = sorted({span.stream for span in timeline.spans}, key=lambda s: (not is_compute(s), s))
    tids = {name: i for i, name in enumerate(names)}
    events = [*_metadata(timeline, tids)]
    for span in timeline.spans:
        begin = round(span.begin * MICRO, 3)
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "pid": span.rank,
                "tid": tids[span.stream],
                "ts": begin,
                "dur": round(max(0.0, span.end * MICRO - begin), 3),
            }
        )
    for rank, samples in timeline.memory.items():
        for seconds, num_bytes in samples:
            args = {"bytes": num_bytes}
            at = round(seconds * MICRO, 3)
            events.append({"name": MEMORY, "ph": "C", "pid": rank, "ts": at, "args": args})
    facts = {"source": timeline.source, **timeline.facts}
    record = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
    return json.dumps(record, separators=(",", ":"))


def _metadata(timeline: Timeline, tids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for rank in timeline.ranks:
        yield _meta("process_name", rank, 0, {"name": f"rank {rank} ({timeline.source})"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
        for stream in timeline.streams(rank):
            yield _meta("thread_name", rank, tids[stream], {"name": stream})
            yield _meta("thread_sort_index", rank, tids[stream], {"sort_index": tids[stream]})


def _meta(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write a timeline; `TraceError` where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_chrome_trace(timeline), encoding="utf-8")
    except OSError as error:
        raise TraceError("trace", str(path), f"a path that can be written ({error})") from None


def read_trace(path: Path) -> Timeline:
    """The timeline in a trace file; `TraceError` says what is wrong with one that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError("trace", str(path), f"a trace file that can be read ({error})") from None
    return from_chrome_trace(text, str(path))


def from_chrome_trace(text: str, where: str = "trace") -> Timeline:
    """The timeline in JSON text; `where` names it in errors."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise TraceError(where, text[:40], f"JSON in the Chrome trace event format ({error})") from None
    # The format knows a bare list of events too.
    events = record.get("traceEvents") if isinstance(record, dict) else record
    if not isinstance(events, list):
        raise TraceError(where, text[:40], 'JSON with a list "traceEvents"')
    rows = [event for event in events if isinstance(event, dict)]
    streams = {
        (event.get("pid"), event.get("tid")): str(event.get("args", {}).get("name", ""))
        for event in rows
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    spans = tuple(_span(event, streams, where) for event in rows if event.get("ph") == "X")
    if not spans:
        raise TraceError(where, f"{len(events)} events", "at least one complete event (ph X)")
    memory: dict[int, list[Sample]] = {}
    for event in rows:
        if event.get("ph") == "C" and event.get("name") == MEMORY:
            value = _number(event.get("args", {}), "bytes", event, where)
            at = _number(event, "ts", event, where) / MICRO
            memory.setdefault(_rank(event, where), []).append(Sample(at, value))
    other = record.get("otherData") if isinstance(record, dict) else None
    facts = {key: str(value) for key, value in other.items()} if isinstance(other, dict) else {}
    source = facts.pop("source", "unknown")
    return Timeline(spans, {rank: tuple(found) for rank, found in memory.items()}, source, facts)


def _span(event: Mapping[str, Any], streams: Mapping[Any, str], where: str) -> Span:
    begin, lasts = (_number(event, key, event, where) for key in ("ts", "dur"))
    if lasts < 0:
        raise TraceError(where, dict(event), "events with a dur of 0 or more")
    rank = _rank(event, where)
    stream = streams.get((rank, event.get("tid"))) or f"thread {event.get('tid')}"
    name, kind = str(event.get("name", "")), str(event.get("cat", "") or "other")
    return Span(name, rank, stream, kind, begin / MICRO, (begin + lasts) / MICRO)


def _rank(event: Mapping[str, Any], where: str) -> int:
    pid = event.get("pid")
    if isinstance(pid, bool) or not isinstance(pid, int):
        raise TraceError(where, dict(event), "events whose pid is a rank")
    return pid


def _number(holder: Any, key: str, event: Mapping[str, Any], where: str) -> float:
    value = holder.get(key) if isinstance(holder, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TraceError(where, dict(event), f'events with a number "{key}"')
    return float(value)
