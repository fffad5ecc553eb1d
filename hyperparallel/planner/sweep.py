"""How the best plan changes with the machine, its size, the sequence, the batch or the model.

Every point is a job planned on its own as `plan_job` does it: searched in closed form, the best simulated,
their stages refined; its numbers are those of the first row of `hyperparallel plan`. What varies most along
the axis of the plot is the first numeric thing with several values; everything else that varies makes a line
of its own. A point without a plan stays as a row that says why.
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

from hyperparallel.errors import UserError
from hyperparallel.plan.wording import bytes_words, count_words, seconds_words
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.explain.rows import FLOPS_WORDS, tokens_s_device
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.planning import Planning, plan_job
from hyperparallel.planner.search.advice import smallest
from hyperparallel.planner.search.search import Objective
from hyperparallel.planner.search.space import EVERYTHING, Limits, levels

NUMERIC = ("devices", "seq", "global_batch")
ASKED = ("model", "cluster", *NUMERIC)
SWEEP_COLUMNS = (
    *(*ASKED, "used_devices", "plan", "stages", "step_seconds", "closed_form_seconds", "tokens_s_device"),
    *("tokens_s", "mfu", "peak_bytes", "exposed_share", "bubble_share", "missing", "notes"),
)
TITLES = (
    *("model", "cluster", "devices", "seq", "batch", "step", "tokens/s/device", "MFU", "memory"),
    *("plan", "notes"),
)
"""Columns of the table for people, in the terminal and on the page."""

NUMBERS = TITLES[2:9]
STEP_WORDS = "step: simulated and refined for each point, as in the first row of `hyperparallel plan`"
LINE_COLOURS = ("#2f6fb7", "#d9822b", "#3a9a63", "#a35bc0", "#c8475d", "#2a9aa5", "#8a8f1f", "#7a7f87")
DASHES = ("none", "7 3", "2 3", "7 3 2 3")
"""One for each time that the colours were used up."""


@dataclass(frozen=True)
class Point:
    """One choice of what was varied. asked: its values under `ASKED`, None where the default could not be
    told. planning: what came out, None where nothing did; then error and, in a few words, missing say why."""

    asked: Mapping[str, Any]
    planning: Planning | None = None
    error: UserError | None = None
    missing: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What `hyperparallel plan` notes about this plan."""
        return self.planning.warnings if self.planning else ()

    def record(self) -> dict[str, Any]:
        """A row under `SWEEP_COLUMNS`; empty where there is no plan."""
        row: dict[str, Any] = dict.fromkeys(SWEEP_COLUMNS, "")
        row |= {name: value for name, value in self.asked.items() if value is not None}
        row |= {"missing": self.missing, "notes": list(self.notes)}
        if self.planning is not None:
            job, best = self.planning.job, self.planning.best
            p, rate = best.expected, tokens_s_device(self.planning, best)
            row |= {
                "used_devices": job.devices,
                "plan": best.words,
                "stages": best.split.words() if best.split else "",
                "step_seconds": best.seconds,
                "closed_form_seconds": best.prediction.seconds,
                "tokens_s_device": rate,
                "tokens_s": rate * job.devices,
                "mfu": job.mfu(best.seconds),
                "peak_bytes": p.peak_bytes,
                "exposed_share": p.exposed_share,
                "bubble_share": max(p.bubble_share, 0.0),
            }
        return row


def sweep(
    jobs: Iterable[PlanningJob],
    objective: Objective = "time",
    limits: Limits = EVERYTHING,
    constants: Constants | None = None,
) -> list[Point]:
    """The best plan of every job."""
    return [point_of(job, objective, limits, constants) for job in jobs]


def point_of(
    job: PlanningJob,
    objective: Objective = "time",
    limits: Limits = EVERYTHING,
    constants: Constants | None = None,
) -> Point:
    """The best plan of one job, or why there is none."""
    asked = {"model": job.model.name, "cluster": job.cluster.name, "devices": job.devices}
    asked |= {"seq": job.seq, "global_batch": job.global_batch}
    try:
        return Point(asked, plan_job(job, objective, limits, constants, top=1))
    except UserError as error:
        over = shortfall(job, limits, constants or Constants())
        why = "no sizes that divide" if over is None else f"does not fit{over}"
        return Point(asked, None, error, f"{why}; {error.instead}" if error.instead else why)


def shortfall(job: PlanningJob, limits: Limits, constants: Constants) -> str | None:
    """By how much the strategy that comes nearest to fitting does not: ": 3.2 GB over"; None without any.

    Of at most `advice.SAMPLED` sizes with all that saves memory; "" where they would fit, but for a choice
    that was fixed.
    """
    capacity = job.cluster.capacity_bytes
    room = job.cluster.tier("host").capacity_per_device_bytes if job.cluster.has_tier("host") else 0.0
    found: list[tuple[float, str]] = []
    for share in sorted({share for _, share in levels(job, limits)}):
        kept = smallest(job, limits, share, constants)
        if kept is None:
            return None
        device, host = max(kept.peak_bytes - capacity, 0.0), max(kept.host_bytes - room, 0.0)
        said = [f"{bytes_words(device)} over"] if device else []
        said += [f"{bytes_words(host)} over in host memory"] if host else []
        found.append((device + host, f": {' and '.join(said)}" if said else ""))
    return min(found, default=(0.0, ""))[1]


def impossible(asked: Mapping[str, Any], error: UserError) -> Point:
    """A point that no plan can have: devices that the machine cannot have, a format, a fixed size."""
    would = f"; {error.instead} would do" if error.instead else ""
    if error.field == "--fix":
        return Point(asked, None, error, f"no {error.given}{would}")
    if not isinstance(error.given, int):
        return Point(asked, None, error, f"not in {error.given}")
    return Point(asked, None, error, f"not with {error.given:,} {error.field.removeprefix('--')}{would}")


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each name.

    >>> list(combinations({"a": [1, 2], "b": [3]}))
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def noted(points: Iterable[Point]) -> list[str]:
    """Every note once, in the order of the points; rows refer to them by number, from 1."""
    return list(dict.fromkeys(note for point in points for note in point.notes))


def point_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """One row of words for each point, under `TITLES`."""
    notes = noted(points)
    found = []
    for point in points:
        row = point.record()
        asked = [_said(row[name]) for name in ASKED]
        numbers, plan = ("", "", "", ""), point.missing
        if point.planning is not None:
            if row["used_devices"] != row["devices"]:
                asked[2] = f"{row['used_devices']:,} of {asked[2]}"
            step, rate = seconds_words(row["step_seconds"]), f"{row['tokens_s_device']:,.0f}"
            numbers, plan = (step, rate, f"{row['mfu']:.1%}", bytes_words(row["peak_bytes"])), row["plan"]
        found.append((*asked, *numbers, plan, ", ".join(str(notes.index(note) + 1) for note in point.notes)))
    return found


def captions(points: Sequence[Point]) -> list[str]:
    """How the numbers of the table are meant."""
    formats = dict.fromkeys(point.planning.job.dtype for point in points if point.planning)
    return [STEP_WORDS, *(FLOPS_WORDS.format(dtype=dtype) for dtype in formats)] if formats else []


def to_csv(points: Sequence[Point]) -> str:
    """One row for each point, with a header; notes with " | " between."""
    text = io.StringIO()
    writer = csv.DictWriter(text, SWEEP_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**point.record(), "notes": " | ".join(point.notes)} for point in points)
    return text.getvalue()


def points_json(points: Sequence[Point]) -> str:
    """The same as a list of records."""
    return json.dumps([point.record() for point in points], indent=1)


def varied(points: Sequence[Point]) -> list[str]:
    """What has several values, what the plot's axis shows first.

    A sequence or batch that follows from the rest, as defaults do, is not counted.
    """
    records = [point.record() for point in points if point.planning is not None]
    many = [name for name in ASKED if len({row[name] for row in records}) > 1]
    for name in ("global_batch", "seq"):
        others = [other for other in many if other != name]
        places = {tuple(row[other] for other in others) for row in records}
        if len(places) == len({(*(row[other] for other in others), row[name]) for row in records}):
            many = others
    return sorted(many, key=lambda name: name not in NUMERIC)


def series(points: Sequence[Point]) -> dict[str, list[dict[str, Any]]]:
    """The records of the points with a plan, by the line of the plot that they lie on."""
    names = varied(points)[1:]
    found: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        if point.planning is not None:
            row = point.record()
            key = ", ".join(f"{_name(n)} {row[n]:,}" if n in NUMERIC else str(row[n]) for n in names)
            found.setdefault(key or row["model"], []).append(row)
    return found


STYLE = """
body{margin:0 auto;max-width:1240px;padding:24px 20px 60px;font:14px/1.5 system-ui,sans-serif;
background:#fbfbfa;color:#1c1e21}*{box-sizing:border-box}
h1{font-size:22px;margin:0 0 8px;overflow-wrap:anywhere}.faint{color:#666b73}
table{border-collapse:collapse;background:#fff;font-size:13px;width:100%}
td,th{border-bottom:1px solid #dcdee2;padding:4px 8px;text-align:left;vertical-align:top}
th{font-weight:500;color:#666b73;white-space:nowrap}td.number,th.number{text-align:right;white-space:nowrap}
td.name{white-space:nowrap}td.plan{min-width:210px}.scroll{overflow-x:auto;margin:20px 0 8px}
.note{border-left:3px solid #e39312;padding:2px 10px;margin:4px 0}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:12px 0}
.legend span{display:inline-flex;gap:6px;align-items:center}.legend svg{flex:none}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
.plots svg{width:100%;height:auto;background:#fff;border:1px solid #dcdee2;border-radius:8px}
text{font-family:system-ui,sans-serif;font-size:12px}
"""


def page(points: Sequence[Point], title: str) -> str:
    """A page with a plot for throughput, MFU and memory, and the table; it loads nothing."""
    plots = [
        plot(points, "tokens_s", "tokens/s"),
        plot(points, "tokens_s_device", "tokens/s/device"),
        plot(points, "mfu", "MFU"),
        plot(points, "peak_bytes", "memory a device"),
    ]
    head = "".join(_cells("th", TITLES))
    body = "".join(f"<tr>{''.join(_cells('td', row))}</tr>" for row in point_rows(points))
    below = "".join(f'<div class="faint">{escape(text)}</div>' for text in captions(points))
    below += "".join(
        f'<div class="note">{number} {escape(note)}</div>' for number, note in enumerate(noted(points), 1)
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'{legend(points)}<div class="plots">{"".join(plots)}</div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{below}</body></html>\n"
    )


def _cells(tag: str, row: Sequence[str]) -> Iterator[str]:
    for name, words in zip(TITLES, row, strict=True):
        kind = "number" if name in NUMBERS else "plan" if name == "plan" else "name"
        yield f'<{tag} class="{kind}">{escape(words)}</{tag}>'


def legend(points: Sequence[Point]) -> str:
    """The lines of all plots by name; "" for a single one."""
    names = list(series(points))
    items = "".join(
        f'<span><svg width="30" height="12">{_mark(index, [(1.0, 6.0), (29.0, 6.0)], [(15.0, 6.0)])}</svg>'
        f"{escape(name)}</span>"
        for index, name in enumerate(names)
    )
    return f'<div class="legend">{items}</div>' if len(names) > 1 else ""


def plot(points: Sequence[Point], column: str, words: str, width: int = 500, height: int = 270) -> str:
    """One number over what varies, as an SVG; points without a plan are left out."""
    axis = next(iter(varied(points)), "devices")
    lines = [[(row[axis], float(row[column])) for row in line] for line in series(points).values()]
    places = sorted({x for line in lines for x, _ in line}, key=lambda x: (isinstance(x, str), x))
    top = max((y for line in lines for _, y in line), default=0.0) * 1.1 or 1.0
    left, bottom, right = 66, height - 44, width - 14

    def x_of(value: Any) -> float:
        if axis in NUMERIC and len(places) > 1:
            share = math.log(value / places[0]) / math.log(places[-1] / places[0])
        else:
            share = (places.index(value) + 0.5) / max(len(places), 1)
        return left + 12 + (right - left - 24) * share

    def y_of(value: float) -> float:
        return bottom - (bottom - 30) * value / top

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{words} by {_name(axis)}">']
    parts.append(f'<text x="{left}" y="18" font-weight="600">{words}</text>')
    for i in range(5):
        value = top * i / 4
        at = y_of(value)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e5e8"/>')
        said = _short(value, column)
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{said}</text>')
    for value in _labels(places):
        at, said = x_of(value), escape(_said(value))
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{said}</text>')
    for index, line in enumerate(lines):
        dots = [(x_of(x), y_of(y)) for x, y in sorted(line, key=lambda item: places.index(item[0]))]
        parts.append(_mark(index, dots if axis in NUMERIC and len(dots) > 1 else [], dots))
    said = _name(axis)
    parts.append(f'<text x="{right}" y="{height - 8}" text-anchor="end" fill="#666">{said}</text>')
    return "".join(parts) + "</svg>"


def _mark(index: int, corners: Sequence[tuple[float, float]], dots: Sequence[tuple[float, float]]) -> str:
    """A line through the corners and the dots on it, as all plots and the legend draw this series."""
    colour, dash = LINE_COLOURS[index % len(LINE_COLOURS)], DASHES[index // len(LINE_COLOURS) % len(DASHES)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
    line = f'<polyline points="{path}" {style}/>' if corners else ""
    return line + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>' for x, y in dots)


def _labels(places: Sequence[Any]) -> Sequence[Any]:
    """At most nine of them."""
    step = math.ceil(len(places) / 9) or 1
    return places[::step]


def _name(column: str) -> str:
    return "batch" if column == "global_batch" else column


def _short(value: float, column: str) -> str:
    if column == "mfu":
        return f"{value:.0%}"
    return bytes_words(value) if column == "peak_bytes" else count_words(value)


def _said(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
