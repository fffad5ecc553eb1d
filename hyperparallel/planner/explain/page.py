"""One self-contained page of a planning: plans, reasons, the simulated step, memory, links and layouts.

The page loads nothing (its own policy forbids it). Its script draws the timeline, which zooms; all else is in
the HTML itself. The template is `page.html` beside this file; drawings stand in `drawings.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from string import Template

from hyperparallel.plan.wording import bytes_words, count_words, seconds_words
from hyperparallel.planner.explain.drawings import (
    followed_ranks,
    memory_chart,
    shown_ranks,
    stacked,
    timeline_data,
    topology,
)
from hyperparallel.planner.explain.rows import (
    FLOPS_WORDS,
    PLAN_COLUMNS,
    memory_words,
    rows,
    time_words,
    title,
    tokens_s_device,
)
from hyperparallel.planner.planning import Planning
from hyperparallel.planner.step.simulated_step import Simulated
from hyperparallel.workload.linear import Linear


def planning_page(planning: Planning) -> str:
    """The page as text."""
    best, job = planning.best, planning.job
    template = Template((files(__package__) / "page.html").read_text(encoding="utf-8"))
    assert best.simulated is not None, "the best plan is always simulated"
    timeline = best.simulated.timeline
    data = json.dumps(timeline_data(timeline), separators=(",", ":")).replace("</", "<\\/")
    return template.substitute(
        title=escape(f"{job.model.name} on {job.devices:,} x {job.cluster.name}"),
        subtitle=escape(title(planning)),
        warnings="".join(f'<div class="note">{escape(text)}</div>' for text in _notes(planning)),
        facts="".join(_fact(name, value) for name, value in _facts(planning)),
        plans=_plans(planning),
        flops=escape(FLOPS_WORDS.format(dtype=job.dtype)),
        reasons="".join(f"<li>{escape(text)}</li>" for text in _why(planning)),
        stacks=_stacks(planning),
        timeline_note=escape(_timeline_note(best.simulated)),
        memory=memory_chart(timeline, job.cluster.capacity_bytes) + _memory_note(planning),
        topology=topology(planning.links, best.seconds),
        layouts=_layouts(planning),
        stages=escape(_stages(planning)),
        data=data,
    )


def _timeline_note(step: Simulated) -> str:
    note = "One rank of each pipeline stage stands for all that do the same."
    drawn, every = shown_ranks(step.timeline), step.timeline.ranks
    if len(drawn) < len(every):
        note += f" {len(drawn)} of {len(every)} stages are drawn, from the first to the last."
    if step.skipped:
        note += f" {step.skipped:,} more microbatches follow at the same pace."
    return note


def _memory_note(planning: Planning) -> str:
    best = planning.best
    assert best.simulated is not None, "the best plan is always simulated"
    timeline = best.simulated.timeline
    drawn, every = followed_ranks(timeline), timeline.ranks
    said = []
    if len(drawn) < len(every):
        said.append(f"{len(drawn)} of {len(every)} stages are drawn: {', '.join(map(str, drawn))}.")
    curve, told = timeline.peak_bytes(), best.expected.peak_bytes
    if abs(curve - told) > 0.005 * told:
        said.append(
            f"The curve peaks at {bytes_words(curve)}, with the microbatches that were simulated; the whole "
            f"step has more in flight and needs {bytes_words(told)}, which table and facts above hold."
        )
    return f'<div class="faint">{escape(" ".join(said))}</div>' if said else ""


def _fact(name: str, value: str) -> str:
    return f'<div class="fact">{name}<b>{escape(value)}</b></div>'


def _facts(planning: Planning) -> Iterator[tuple[str, str]]:
    best = planning.best
    p = best.expected
    yield "plan", best.words
    yield "step", seconds_words(best.seconds)
    yield "tokens/s/device", f"{tokens_s_device(planning, best):,.0f}"
    yield "MFU", f"{planning.job.mfu(best.seconds):.1%}"
    yield "memory", f"{p.peak_bytes / 1e9:.1f} of {planning.job.cluster.capacity_bytes / 1e9:.1f} GB"
    yield "exposed", f"{p.exposed_share:.1%}"
    yield "bubble", f"{max(p.bubble_share, 0.0):.1%}"


def _notes(planning: Planning) -> Iterator[str]:
    absent = planning.best.missing
    if absent:
        yield f"Not executable yet: {', '.join(absent)}."
    yield from planning.warnings


def _plans(planning: Planning) -> str:
    head = "".join(
        f'<th class="{"" if name == "plan" else "number"}">{escape(name)}</th>' for name in PLAN_COLUMNS
    )
    body = []
    for index, row in enumerate(rows(planning)):
        cells = "".join(
            f'<td class="{"name" if i == 0 else "number"}">{escape(cell)}</td>' for i, cell in enumerate(row)
        )
        body.append(f'<tr class="{"best" if index == 0 else "other"}">{cells}</tr>')
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"


def _why(planning: Planning) -> Iterator[str]:
    yield from (reason.words for reason in planning.reasons)
    if planning.uneven:
        yield f"stages: {planning.uneven}"
    if planning.against:
        yield f"the second: {planning.against}"
    for devices, seconds in planning.scaled:
        yield f"on {devices:,} devices: {seconds_words(seconds)} a step"
    yield f"{planning.considered:,} strategies were searched, {planning.fitting:,} of them fit in memory"


def _stacks(planning: Planning) -> str:
    p = planning.best.expected
    time = {name.replace("_", " "): max(value, 0.0) for name, value in p.parts.items()}
    return (
        f"<div>step</div><div>{stacked(time, sum(time.values()), seconds_words)}"
        f'<div class="faint">{escape(time_words(p))}</div></div>'
        f"<div>memory</div><div>{stacked(p.memory, planning.job.cluster.capacity_bytes, bytes_words)}"
        f'<div class="faint">{escape(memory_words(p))}</div></div>'
    )


def _layouts(planning: Planning) -> str:
    """Every matrix of every kind of layer, how it is cut, and what a device holds of it."""
    model, s = planning.job.model, planning.best.prediction.strategy
    head = "<thead><tr><th>block</th><th>matrix</th><th>shape</th><th>layout</th>"
    head += '<th class="number">of it on a device</th></tr></thead>'
    body = []
    batch = [f"batch in {s.dp} by dp"] if s.dp > 1 else []
    sequence = [f"{axis}{getattr(s, axis)}" for axis in ("cp", "tp") if getattr(s, axis) > 1
                and (axis == "cp" or s.sp)]  # fmt: skip
    batch += [f"sequence by {' x '.join(sequence)}"] if sequence else []
    shape = f"{s.microbatch} x {planning.job.seq:,} x {model.hidden:,}"
    body.append(_layout_row("between layers", "activations", shape, ", ".join(batch) or "whole", ""))
    if model.vocab:
        cut = f"vocabulary in {s.tp} by tp" if s.tp > 1 else "whole"
        held = count_words(model.vocab * model.hidden / s.tp)
        shape = f"{model.vocab:,} x {model.hidden:,}"
        body.append(_layout_row("embedding, head", "table", shape, cut, held))
    for layer, count in model.kinds:
        for i, linear in enumerate(layer.linears(model.hidden)):
            block = f"{count} x {layer.words()}" if i == 0 else ""
            cut, pieces = linear_layout(linear, s.tp, s.ep, s.etp)
            size = f"{linear.outputs:,} x {linear.inputs:,}"
            size = f"{linear.copies} x {size}" if linear.copies > 1 else size
            body.append(_layout_row(block, linear.name, size, cut, count_words(linear.params / pieces)))
    return f"{head}<tbody>{''.join(body)}</tbody>"


def linear_layout(linear: Linear, tp: int, ep: int, etp: int) -> tuple[str, int]:
    """How a weight matrix is cut, in words, and in how many pieces.

    >>> linear_layout(Linear("up", 8, 32, cut="out"), tp=4, ep=1, etp=1)
    ('rows in 4 by tp', 4)
    """
    experts = linear.copies > 1
    axis, size = ("etp", etp) if experts else ("tp", tp)
    said, pieces = [], 1
    if experts and ep > 1:
        said.append(f"experts in {ep} by ep")
        pieces *= ep
    if linear.cut != "none" and size > 1:
        said.append(f"{'rows' if linear.cut == 'out' else 'columns'} in {size} by {axis}")
        pieces *= size
    return ", ".join(said) or "whole", pieces


def _layout_row(block: str, matrix: str, shape: str, layout: str, held: str) -> str:
    return (
        f'<tr><td>{escape(block)}</td><td class="name">{escape(matrix)}</td><td class="name">{escape(shape)}'
        f'</td><td>{escape(layout)}</td><td class="number">{escape(held)}</td></tr>'
    )


def _stages(planning: Planning) -> str:
    best = planning.best
    s = best.prediction.strategy
    said = {
        1: "Optimizer states are cut over the data axis.",
        2: "Gradients and optimizer states are cut over the data axis.",
        3: "Parameters, gradients and optimizer states are cut over the data axis, gathered where used.",
    }.get(s.zero, "") if s.dp * s.cp > 1 else ""  # fmt: skip
    if best.split is not None:
        said += f" Stages: {best.split.words()}."
    return said.strip()
