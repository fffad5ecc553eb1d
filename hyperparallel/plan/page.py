"""One self-contained HTML page of a derived plan: diagram, parameters, collectives, mesh.

The page loads nothing (its own policy forbids it), so it can be mailed or kept with a run. All is
in the HTML itself; the script only filters rows. The template is `page.html` beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template

from hyperparallel.layout import Mesh
from hyperparallel.plan.derived import BlockLayout, Derived
from hyperparallel.plan.diagram import draw
from hyperparallel.plan.report import (
    CommunicationRow,
    ParameterRow,
    communication_rows,
    layout_names,
    parameter_rows,
)
from hyperparallel.plan.wording import REPLICATED, axes_words, bytes_words, fold, layout_words, mesh_words

NUM_COLOURS = 8
MOST_RANKS_DRAWN = 64


def html_page(derived: Derived, title: str = "hyperparallel plan") -> str:
    """The page as text."""
    parameters, communications = parameter_rows(derived), communication_rows(derived)
    colours = colour_classes(derived)
    template = Template((files(__package__) / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        summary=escape(derived.summary()).replace("\n", "<br>"),
        hashes=escape(f"plan {derived.plan_hash}, model {derived.model_hash}"),
        ranks=_ranks(derived.mesh) if derived.mesh else "no mesh",
        legend=_legend(colours),
        batch=_batch(derived),
        diagram=draw(derived, parameters, communications, colours),
        parameters="\n".join(_parameter(row, colours) for row in parameters),
        collectives=_collectives(communications, derived.mesh),
        values=_values(derived.values),
        plan=escape(derived.plan),
    )


def colour_classes(derived: Derived) -> dict[str, str]:
    """Layout in words -> CSS class; past the last colour they start again."""
    return {
        words: "whole" if words == REPLICATED else f"k{index % NUM_COLOURS}"
        for index, words in enumerate(layout_names(derived))
    }


def _legend(colours: Mapping[str, str]) -> str:
    rows = "".join(
        f'<span class="swatch {name}"></span><span>{escape(words)}</span>'
        for words, name in colours.items()
    )
    return f'<div class="legend">{rows}</div>'


def _ranks(mesh: Mesh) -> str:
    """The mesh as a grid of rank numbers, the last axis across."""
    text = f"<div>mesh {escape(mesh_words(mesh))}</div>"
    if mesh.size > MOST_RANKS_DRAWN or not mesh.names:
        return text + f'<div class="faint">{mesh.size} ranks</div>'
    across, width = mesh.names[-1], mesh.shape[-1]
    head = "".join(f"<th>{escape(across)} {index}</th>" for index in range(width))
    rows = []
    for start in range(0, mesh.size, width):
        ranks = mesh.ranks[start : start + width]
        where = mesh.coordinate(ranks[0])
        label = " ".join(f"{name} {where[name]}" for name in mesh.names[:-1])
        cells = "".join(f"<td>{rank}</td>" for rank in ranks)
        rows.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    return f'{text}<table class="ranks"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


def _batch(derived: Derived) -> str:
    lines = []
    for what, layouts in (("batch", derived.inputs), ("results", derived.outputs)):
        for name, layout in layouts.items():
            lines.append(f"<div>{what} <b>{escape(name)}</b>: {escape(layout_words(layout))}</div>")
    return "".join(lines) or "no batch"


def _parameter(row: ParameterRow, colours: Mapping[str, str]) -> str:
    name = escape(row.title)
    if len(row.names) > 1:
        every = "<br>".join(escape(each) for each in row.names)
        name = f"<details><summary>{name}</summary>{every}</details>"
    reason = escape(row.reason)
    return (
        f'<tr><td class="name">{name}</td><td class="name shape">{list(row.shape)}</td>'
        f'<td><span class="swatch {colours[row.stored]}" style="display:inline-block"></span> '
        f'{escape(row.layout)}</td><td class="number">{bytes_words(row.rank_bytes)}</td>'
        f"<td>{f'<b>{reason}</b>' if row.declared else reason}</td></tr>"
    )


def _collectives(rows: list[CommunicationRow], mesh: Mesh | None) -> str:
    if not rows:
        return '<tr><td colspan="7">none: every rank works alone</td></tr>'
    most = max(row.step_bytes for row in rows) or 1
    text = []
    for row in rows:
        ranks = 1
        for axis in row.axes:
            ranks *= mesh.axis_size(axis) if mesh and axis in mesh.names else 1
        text.append(
            f'<tr><td class="shape">{row.phase}</td><td class="shape">{escape(row.kind)}</td>'
            f'<td class="shape">{escape(axes_words(row.axes))} '
            f'<span class="faint">({ranks} ranks)</span></td>'
            f'<td class="number">{row.count}</td>'
            f'<td class="number">{bytes_words(row.step_bytes)} <span class="faint">{row.dtype}</span>'
            f'<div class="bar" style="width:{100 * row.step_bytes / most:.0f}%"></div></td>'
            f'<td class="name">{escape(row.where)}</td><td class="why">{escape(row.reason)}</td></tr>'
        )
    return "\n".join(text)


def _values(values: tuple[BlockLayout, ...]) -> str:
    """Layouts of what ops make, folded by block, behind a fold of their own."""
    rows = dict.fromkeys((fold(v.module), v.op, fold(v.value), v.shape, v.layout) for v in values)
    if not rows:
        return ""
    body = "\n".join(
        f'<tr><td class="name">{escape(module)}</td><td class="name">{escape(op)}</td>'
        f'<td class="name">{escape(value)}</td><td class="name">{list(shape)}</td>'
        f'<td class="name">{escape(layout)}</td></tr>'
        for module, op, value, shape, layout in rows
    )
    return (
        f"<h2>Values</h2><details><summary>layouts of {len(rows)} values that ops make</summary>"
        '<div class="scroll"><table class="rows"><thead><tr><th>module</th><th>op</th>'
        f"<th>value</th><th>shape</th><th>layout</th></tr></thead><tbody>{body}</tbody></table>"
        "</div></details>"
    )
