"""`hyperparallel compare`: a predicted step against a measured one, from their trace files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hyperparallel.simulate import Comparison, Row


def compare(
    predicted: Annotated[Path, typer.Argument(help="Trace of the simulated step.")],
    measured: Annotated[Path, typer.Argument(help="Trace of the real step (train --trace).")],
    within: Annotated[
        float | None,
        typer.Option(min=0.0, help="Exit with status 1 if the step's seconds are off by more (0.15)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare a predicted step with a measured one: seconds by kind, overlap, order of actions."""
    from hyperparallel.simulate import compare as compared
    from hyperparallel.simulate import read_trace

    found = compared(read_trace(predicted), read_trace(measured))
    typer.echo(comparison_json(found)) if as_json else print_tables(found)
    if within is not None:
        good = abs(found.step_error) <= within
        verdict = f"step predicted {'within' if good else 'NOT within'} {within:.0%}"
        typer.echo(verdict, err=as_json)
        raise typer.Exit(0 if good else 1)


def comparison_json(found: Comparison) -> str:
    """The comparison as JSON; an error that is not defined is null."""

    def rows(items: tuple[Row, ...]) -> list[dict[str, object]]:
        return [
            {"name": r.name, "unit": r.unit, "predicted": r.predicted, "measured": r.measured,
             "error": None if math.isnan(r.error) else r.error}
            for r in items
        ]  # fmt: skip

    record = {"summary": rows(found.summary), "kinds": rows(found.kinds), "disorder": found.disorder}
    return json.dumps(record, indent=1)


def print_tables(found: Comparison) -> None:
    """Print the step, its kinds, and what is to say of the order."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hyperparallel.cli.tables import PIPE_WIDTH

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    for title, rows in (("step", found.summary), ("seconds by kind", found.kinds)):
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        table.add_column("")
        for column in ("predicted", "measured", "error"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(row.name, value_words(row, row.predicted), value_words(row, row.measured),
                          error_words(row))  # fmt: skip
        console.print(table)
    order = f"order differs: {found.disorder}" if found.disorder else "same order of actions"
    console.print(Text(order))


def value_words(row: Row, value: float) -> str:
    """A value in its unit."""
    from hyperparallel.plan.wording import bytes_words, seconds_words

    if row.unit == "share":
        return f"{value:.1%}"
    return bytes_words(value) if row.unit == "bytes" else seconds_words(value)


def error_words(row: Row) -> str:
    """The difference: in points for shares, else relative."""
    if row.unit == "share":
        return f"{100 * (row.predicted - row.measured):+.1f} points"
    return "" if math.isnan(row.error) else f"{row.error:+.1%}"
