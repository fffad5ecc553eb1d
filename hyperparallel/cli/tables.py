"""A derived plan as tables in the terminal; the rows are those of `plan/report.py`."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperparallel.plan.derived import Derived
from hyperparallel.plan.report import (
    CommunicationRow,
    ParameterRow,
    communication_rows,
    layout_names,
    mesh_lines,
    parameter_rows,
    precision_lines,
)
from hyperparallel.plan.wording import REPLICATED, axes_words, bytes_words, layout_words

TERMINAL_COLOURS = ("cyan", "yellow", "green", "magenta", "red", "blue")
PIPE_WIDTH = 1000
"""Columns when the output is no terminal: rows are never wrapped, so they can be searched for."""


def print_derived(derived: Derived) -> None:
    """Print summary, mesh, parameters, batch and collectives."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    console.print(Text(derived.summary()))
    console.print(Text(f"plan {derived.plan_hash}, model {derived.model_hash}", "dim"))
    for line in (*precision_lines(derived), *mesh_lines(derived)):
        console.print(Text(line))
    console.print(parameter_table(derived))
    for what, layouts in (("batch", derived.inputs), ("results", derived.outputs)):
        for name, layout in layouts.items():
            console.print(Text(f"{what} {name}: {layout_words(layout)}"))
    console.print(communication_table(derived))


def parameter_table(derived: Derived) -> Table:
    """Parameters, repeated blocks folded, coloured by layout."""
    names = [name for name in layout_names(derived) if name != REPLICATED]
    colours = {name: TERMINAL_COLOURS[index % len(TERMINAL_COLOURS)] for index, name in enumerate(names)}
    table = _table("parameters", "parameter", "shape", "layout", "per rank", "why")
    for row in parameter_rows(derived):
        table.add_row(*_parameter_cells(row, colours.get(row.stored, "")))
    return table


def communication_table(derived: Derived) -> Table:
    """Collectives of a step by phase and place."""
    title = "collectives per step (bytes are what one rank receives)"
    table = _table(title, "phase", "collective", "over", "count", "bytes", "dtype", "where", "why")
    for row in communication_rows(derived):
        table.add_row(*_communication_cells(row))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in columns:
        right = column in ("count", "bytes", "per rank")
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


def _parameter_cells(row: ParameterRow, colour: str) -> list[Text]:
    shape = " x ".join(str(size) for size in row.shape)
    cells = [row.title, shape, row.layout, bytes_words(row.rank_bytes), row.reason]
    return [Text(cell, colour if index == 2 else "") for index, cell in enumerate(cells)]


def _communication_cells(row: CommunicationRow) -> list[Text]:
    cells = [row.phase, row.kind, axes_words(row.axes), str(row.count)]
    return [Text(cell) for cell in (*cells, bytes_words(row.step_bytes), row.dtype, row.where, row.reason)]
