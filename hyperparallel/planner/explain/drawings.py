"""Drawings of a planning's page: spans for the timeline's script, memory as SVG, bars, link glyphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from hyperparallel.plan.wording import bytes_words
from hyperparallel.planner.step.link_load import Link
from hyperparallel.simulate import Timeline
from hyperparallel.simulate.timeline import STALLS, Sample, is_compute

STREAM_COLOURS = {
    "forward": "hsl(212 75% 68%)",
    "backward": "hsl(150 45% 60%)",
    "input gradients": "hsl(150 45% 60%)",
    "weight gradients": "hsl(95 45% 62%)",
    "recompute": "hsl(48 80% 62%)",
    "update": "hsl(280 40% 70%)",
    "tensor messages": "hsl(28 85% 60%)",
    "tokens to experts": "hsl(345 70% 66%)",
    "parameters gathered": "hsl(185 50% 52%)",
    "parameters": "hsl(185 50% 52%)",
    "gradients": "hsl(185 45% 42%)",
    "stage boundary": "hsl(260 55% 62%)",
    "host copy": "hsl(0 0% 58%)",
    "compute": "hsl(212 75% 68%)",
    "exposed tensor": "hsl(28 85% 60%)",
    "exposed experts": "hsl(345 70% 66%)",
    "exposed gradients": "hsl(185 45% 42%)",
    "exposed host": "hsl(0 0% 58%)",
    "bubble": "hsl(0 0% 78%)",
    "optimizer": "hsl(280 40% 70%)",
    "activations": "hsl(150 45% 60%)",
    "working": "hsl(48 80% 62%)",
    "overhead": "hsl(0 0% 70%)",
}
SPARE = ("hsl(320 45% 65%)", "hsl(70 50% 55%)", "hsl(15 45% 55%)")
AXIS_COLOURS = {
    "tp": STREAM_COLOURS["tensor messages"],
    "cp": "hsl(48 80% 55%)",
    "dp": STREAM_COLOURS["gradients"],
    "ep": STREAM_COLOURS["tokens to experts"],
    "pp": STREAM_COLOURS["stage boundary"],
}
MOST_SPANS, MOST_DRAWN_RANKS = 24000, 16
MOST_POINTS = 700


def colour_of(name: str) -> str:
    """The colour of a kind of span or a part."""
    return STREAM_COLOURS.get(name, SPARE[sum(map(ord, name)) % len(SPARE)])


def shown_ranks(timeline: Timeline) -> list[int]:
    """All ranks, or where they are many, some from the first to the last."""
    ranks = list(timeline.ranks)
    per_rank = max(1, len(timeline.spans) // max(1, len(ranks)))
    most = max(2, min(MOST_DRAWN_RANKS, MOST_SPANS // per_rank))
    if len(ranks) <= most:
        return ranks
    return [ranks[round(i * (len(ranks) - 1) / (most - 1))] for i in range(most)]


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws: lanes (a stream of a rank), kinds, names, and spans as
    [lane, kind, begin, end, name]."""
    lanes: list[dict[str, Any]] = []
    spans: list[list[float]] = []
    kinds: dict[str, int] = {}
    names: dict[str, int] = {}
    for rank in shown_ranks(timeline):
        first = True
        for stream, row in sorted(timeline.streams(rank).items(), key=lambda item: not is_compute(item[0])):
            told = [s for s in row if s.end > s.begin and s.kind not in STALLS]
            if not told:
                continue
            lane = {"stream": stream, "compute": is_compute(stream), "first": first, "label": f"stage {rank}"}
            lanes.append(lane)
            first = False
            for s in told:
                kind = kinds.setdefault(s.kind, len(kinds))
                name = names.setdefault(s.name or s.kind, len(names))
                spans.append([len(lanes) - 1, kind, round(s.begin, 7), round(s.end, 7), name])
    return {
        "seconds": timeline.step_seconds,
        "lanes": lanes,
        "kinds": [{"name": kind, "colour": colour_of(kind)} for kind in kinds],
        "names": list(names),
        "spans": spans,
    }


def followed_ranks(timeline: Timeline) -> list[int]:
    """Ranks whose memory is drawn: the first, a middle, the last and the fullest."""
    ranks = [rank for rank in timeline.ranks if rank in timeline.memory]
    if not ranks:
        return []
    fullest = max(ranks, key=timeline.peak_bytes)
    return sorted({ranks[0], ranks[len(ranks) // 2], ranks[-1], fullest})


def memory_chart(timeline: Timeline, capacity: float, width: int = 1140, height: int = 230) -> str:
    """Memory in use on some ranks, the fullest among them, under the capacity, as SVG."""
    chosen = followed_ranks(timeline)
    if not chosen:
        return "not followed"
    top, left, bottom = 1.08 * max(capacity, timeline.peak_bytes()), 62, height - 24
    seconds = timeline.step_seconds or 1.0

    def x(at: float) -> float:
        return left + (width - left - 8) * at / seconds

    def y(num_bytes: float) -> float:
        return bottom - (bottom - 8) * num_bytes / top

    parts = [f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="memory over time">']
    for i in range(5):
        value = capacity * i / 4
        at, words = y(value), bytes_words(value) if i else "0"
        parts.append(f'<line class="axis" x1="{left}" x2="{width - 8}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="faint" x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{words}</text>')
    parts.append(
        f'<line x1="{left}" x2="{width - 8}" y1="{y(capacity):.1f}" y2="{y(capacity):.1f}" '
        'stroke="hsl(0 70% 55%)" stroke-dasharray="6 4"/>'
        f'<text x="{width - 10}" y="{y(capacity) - 4:.1f}" text-anchor="end">capacity</text>'
    )
    colours = ("hsl(212 75% 55%)", "hsl(150 45% 45%)", "hsl(28 85% 52%)", "hsl(280 40% 60%)")
    for index, rank in enumerate(chosen):
        points = thinned(timeline.memory[rank])
        path = f"M{x(points[0].seconds):.1f},{y(points[0].num_bytes):.1f}"
        for sample in points[1:]:
            path += f"H{x(sample.seconds):.1f}V{y(sample.num_bytes):.1f}"
        path += f"H{x(seconds):.1f}"
        parts.append(f'<path d="{path}" fill="none" stroke="{colours[index]}" stroke-width="1.4"/>')
        peak = bytes_words(timeline.peak_bytes(rank))
        at = left + 8 + 230 * index
        parts.append(f'<rect x="{at}" y="{height - 14}" width="14" height="4" fill="{colours[index]}"/>')
        parts.append(f'<text x="{at + 20}" y="{height - 8}">stage {rank}: peak {peak}</text>')
    return "".join(parts) + "</svg>"


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """At most `MOST_POINTS` or so, with the peaks and troughs of what lies between."""
    if len(samples) <= MOST_POINTS:
        return list(samples)
    size = math.ceil(2 * len(samples) / MOST_POINTS)
    kept: list[Sample] = []
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        low = min(part, key=lambda s: s.num_bytes)
        high = max(part, key=lambda s: s.num_bytes)
        kept += sorted({low, high}, key=lambda s: s.seconds)
    return kept


def stacked(parts: Mapping[str, float], whole: float, words: Callable[[float], str]) -> str:
    """A bar of parts, each as wide as its share of the whole."""
    cells = "".join(
        f'<div style="width:{100 * value / whole:.2f}%;background:{colour_of(name)}" '
        f'title="{escape(name)}: {escape(words(value))}"></div>'
        for name, value in parts.items()
        if value > 0
    )
    legend = "".join(
        f'<span><i class="swatch" style="background:{colour_of(name)}"></i>{escape(name)}</span>'
        for name, value in parts.items()
        if value > 0.001 * whole
    )
    return f'<div class="stack">{cells}</div><div class="legend">{legend}</div>'


def topology(links: Sequence[Link], seconds: float) -> str:
    """A row for each dimension of the fabric: its shape, its facts, its load by axis."""
    rows = []
    for link in links:
        load = link.load(seconds)
        axes = ", ".join(f"{axis} {size}" for axis, size in link.members.items()) or "no axis"
        capacity = link.bytes_s * seconds
        bars = "".join(_load_bar(axis, sent, capacity) for axis, sent in link.sent_bytes.items())
        legend = "".join(
            f'<span><i class="swatch" style="background:{AXIS_COLOURS.get(axis, "gray")}"></i>'
            f"{axis} {bytes_words(sent)}</span>"
            for axis, sent in link.sent_bytes.items()
        )
        rows.append(
            f"{link_glyph(link, load)}<div><b>{escape(link.name)}</b>"
            f'<div class="faint">{link.kind} of {link.width:,}, {link.bytes_s / 1e9:.3g} GB/s a device</div>'
            f'<div class="faint">crossed by {escape(axes)}</div></div>'
            f'<div><div>{load:.1%} of its capacity over the step</div><div class="stack">{bars}</div>'
            f'<div class="legend">{legend}</div></div>'
        )
    return "".join(rows) or "one device"


def _load_bar(axis: str, sent: float, capacity: float) -> str:
    width, colour = max(100 * sent / capacity, 0.3), AXIS_COLOURS.get(axis, "gray")
    words = f"{axis}: {bytes_words(sent)} a step"
    return f'<div style="width:{width:.2f}%;background:{colour}" title="{words}"></div>'


def link_glyph(link: Link, load: float) -> str:
    """A small picture of a fabric dimension: its shape, coloured by load."""
    count = min(link.width, 8)
    hue = 150 - 150 * min(load / 0.8, 1.0)
    stroke = f'stroke="hsl({hue:.0f} 60% 45%)" stroke-width="{1 + 2 * min(load, 1.0):.1f}"'
    points = [
        (45 + 32 * math.cos(2 * math.pi * i / count), 40 + 32 * math.sin(2 * math.pi * i / count))
        for i in range(count)
    ]
    if link.kind == "mesh":
        pairs = [(a, b) for i, a in enumerate(points) for b in points[:i]]
    elif link.kind == "switch":
        pairs = [(a, (45.0, 40.0)) for a in points]
    else:
        pairs = [(a, points[(i + 1) % count]) for i, a in enumerate(points)]
    drawn = "".join(
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" {stroke}/>' for a, b in pairs
    )
    if link.kind == "switch":
        drawn += '<rect x="36" y="33" width="18" height="14" rx="3" fill="var(--ink)"/>'
    drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="var(--faint)"/>' for x, y in points)
    return f'<svg viewBox="0 0 90 80" width="90" role="img" aria-label="{escape(link.kind)}">{drawn}</svg>'
