"""How the best plan changes with the machine, its size, the sequence, the batch or the model.

Every point is a job planned in closed form on its own. What varies most along the axis of the plot is the
first numeric thing with several values; everything else that varies makes a line of its own.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from typing import Any

from hyperparallel.errors import ClusterError, PlanError
from hyperparallel.plan.cost.constants import Constants
from hyperparallel.plan.search.find import Objective, find
from hyperparallel.plan.search.job import Job
from hyperparallel.plan.search.pricing import Prediction
from hyperparallel.plan.search.space import EVERYTHING, Limits

NUMERIC = ("devices", "seq", "global_batch")
COLUMNS = (
    *("model", "cluster", "devices", "seq", "global_batch", "plan", "step_seconds", "tokens_s_device"),
    *("tokens_s", "mfu", "peak_bytes", "exposed_share", "bubble_share", "missing"),
)
COLOURS = ("#2f6fb7", "#d9822b", "#3a9a63", "#a35bc0", "#c8475d", "#2a9aa5", "#8a8f1f", "#7a7f87")


@dataclass(frozen=True)
class Point:
    """One job; best: its best plan, None where there is none; missing: then why, in a few words."""

    job: Job
    best: Prediction | None
    missing: str = ""

    def record(self) -> dict[str, Any]:
        """A row under `COLUMNS`; empty where there is no plan."""
        job, p = self.job, self.best
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row |= {"model": job.model.name, "cluster": job.cluster.name, "devices": job.devices}
        row |= {"seq": job.seq, "global_batch": job.global_batch, "missing": self.missing}
        if p is not None:
            row |= {
                "plan": p.strategy.words(),
                "step_seconds": p.seconds,
                "tokens_s_device": job.tokens / p.seconds / job.devices,
                "tokens_s": job.tokens / p.seconds,
                "mfu": job.mfu(p.seconds),
                "peak_bytes": p.peak_bytes,
                "exposed_share": p.exposed_share,
                "bubble_share": max(p.bubble_share, 0.0),
            }
        return row


def sweep(
    jobs: Iterable[Job],
    objective: Objective = "time",
    limits: Limits = EVERYTHING,
    constants: Constants | None = None,
) -> list[Point]:
    """The best plan of every job."""
    points = []
    for job in jobs:
        try:
            best = find(job, objective, limits, constants, keep=1).best
            points.append(Point(job, best[0] if best else None, "" if best else "does not fit"))
        except (PlanError, ClusterError):
            points.append(Point(job, None, "no sizes that divide"))
    return points


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each name.

    >>> list(combinations({"a": [1, 2], "b": [3]}))
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def to_csv(points: Sequence[Point]) -> str:
    """One row for each point, with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(point.record() for point in points)
    return text.getvalue()


def to_json(points: Sequence[Point]) -> str:
    """The same as a list of records."""
    return json.dumps([point.record() for point in points], indent=1)


def varied(points: Sequence[Point]) -> list[str]:
    """What has several values, what the plot's axis shows first."""
    rows = [point.record() for point in points]
    many = [name for name in COLUMNS[:5] if len({row[name] for row in rows}) > 1]
    return sorted(many, key=lambda name: name not in NUMERIC)


def page(points: Sequence[Point], title: str) -> str:
    """A page with a plot for throughput, MFU and memory, and the table; it loads nothing."""
    plots = [
        plot(points, "tokens_s", "tokens/s"),
        plot(points, "tokens_s_device", "tokens/s/device"),
        plot(points, "mfu", "MFU"),
        plot(points, "peak_bytes", "peak bytes"),
    ]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in point.record().values()) + "</tr>"
        for point in points
    )
    style = (
        "body{margin:0 auto;max-width:1240px;padding:24px 20px;font:14px/1.5 system-ui,sans-serif;"
        "background:#fbfbfa;color:#1c1e21}table{border-collapse:collapse;background:#fff;font-size:13px}"
        "td,th{border-bottom:1px solid #dcdee2;padding:4px 10px;text-align:left;white-space:nowrap}"
        ".plots{display:flex;flex-wrap:wrap;gap:14px}.scroll{overflow-x:auto;margin-top:20px}"
        "svg{background:#fff;border:1px solid #dcdee2;border-radius:8px}text{font:12px system-ui,sans-serif}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>"
        f'<div class="plots">{"".join(plots)}</div><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></body></html>\n"
    )


def plot(points: Sequence[Point], column: str, words: str, width: int = 590, height: int = 300) -> str:
    """One number over what varies, as an SVG; points without a plan are left out."""
    names = varied(points)
    axis = names[0] if names else "devices"
    lines: dict[str, list[tuple[Any, float]]] = {}
    for point in points:
        row = point.record()
        key = ", ".join(str(row[name]) for name in names[1:]) or row["model"]
        lines.setdefault(key, [])
        if point.best is not None:
            lines[key].append((row[axis], float(row[column])))
    places = sorted({x for line in lines.values() for x, _ in line}, key=lambda x: (isinstance(x, str), x))
    top = max((y for line in lines.values() for _, y in line), default=0.0) * 1.1 or 1.0
    left, bottom, right = 66, height - 44, width - 14

    def x_of(value: Any) -> float:
        if axis in NUMERIC and len(places) > 1 and places[0] > 0:
            share = math.log(value / places[0]) / math.log(places[-1] / places[0])
        else:
            share = (places.index(value) + 0.5) / max(len(places), 1)
        return left + 12 + (right - left - 24) * share

    def y_of(value: float) -> float:
        return bottom - (bottom - 30) * value / top

    parts = [f'<svg width="{width}" height="{height}" role="img" aria-label="{words} by {axis}">']
    parts.append(f'<text x="{left}" y="18" font-weight="600">{words}</text>')
    for i in range(5):
        value = top * i / 4
        at = y_of(value)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e5e8"/>')
        parts.append(
            f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{_short(value, column)}</text>'
        )
    for value in _labels(places):
        x = x_of(value)
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(_cell(value))}</text>'
        )
    for index, (key, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        corners = [(x_of(x), y_of(y)) for x, y in sorted(line, key=lambda item: places.index(item[0]))]
        if axis in NUMERIC and len(corners) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>' for x, y in corners]
        if len(lines) > 1:
            place = left + 180 + 130 * index
            parts.append(f'<text x="{place}" y="18" fill="{colour}">{escape(key)}</text>')
    parts.append(
        f'<text x="{right}" y="{height - 8}" text-anchor="end" fill="#666">{axis.replace("_", " ")}</text>'
    )
    return "".join(parts) + "</svg>"


def _labels(places: Sequence[Any]) -> Sequence[Any]:
    """At most nine of them."""
    step = math.ceil(len(places) / 9) or 1
    return places[::step]


def _short(value: float, column: str) -> str:
    if column == "mfu":
        return f"{value:.0%}"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _cell(value: Any) -> str:
    return (
        f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )
