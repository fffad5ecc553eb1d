"""`hyperparallel sweep`: the best plan over machines, sizes, sequences, batches or models, with a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hyperparallel.planner.search.search import Objective
    from hyperparallel.planner.search.space import Limits
    from hyperparallel.planner.sweep import Point

Values = Annotated[str | None, typer.Option(help="One value or several with commas between.")]
LIST_EXAMPLES = {"--devices": "8,16,32", "--seq": "4096,8192", "--global-batch": "512,1024"}


def sweep(
    model: Annotated[str, typer.Argument(help="Model presets or config.json files, with commas between.")],
    cluster: Annotated[str, typer.Option(help="Machines: presets or files, with commas between.")],
    devices: Values = None,
    seq: Values = None,
    global_batch: Values = None,
    objective: Annotated[str, typer.Option(help="time, memory, or cost (device seconds a step).")] = "time",
    dtype: Annotated[str, typer.Option(help="Format of the matrix products.")] = "bf16",
    runnable: Annotated[bool, typer.Option("--runnable", help="Only what the executor runs today.")] = False,
    fix: Annotated[str | None, typer.Option(help="Fields of the strategy: tp=8,zero=1.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the rows as JSON.")] = None,
) -> None:
    """Plan every combination of the given values as `plan` does, and show how the best plan changes."""
    from hyperparallel.cli.planning import read_fixed
    from hyperparallel.cli.request import write_text
    from hyperparallel.errors import UserError
    from hyperparallel.planner.search.search import OBJECTIVES
    from hyperparallel.planner.search.space import Limits
    from hyperparallel.planner.sweep import page, points_json, to_csv

    known = next((one for one in OBJECTIVES if one == objective), None)
    if known is None:
        raise UserError("--objective", objective, ", ".join(OBJECTIVES))
    values: dict[str, list[Any]] = {
        "model": words_of("MODEL", model),
        "cluster": words_of("--cluster", cluster),
        "devices": numbers_of("--devices", devices),
        "seq": numbers_of("--seq", seq),
        "global_batch": numbers_of("--global-batch", global_batch),
    }
    points = points_of(values, dtype, known, Limits(runnable, read_fixed(fix)))
    print_points(points)
    first = points[0].error
    if first is not None and not any(point.planning for point in points):
        raise first
    title = f"{model} on {cluster}"
    written = ((html, "--html", page(points, title)), (csv, "--csv", to_csv(points)),
               (as_json, "--json", points_json(points)))  # fmt: skip
    for path, option, text in written:
        if path is not None:
            write_text(path, text, option)
            typer.echo(f"saved {path}")


def points_of(
    values: Mapping[str, Sequence[Any]], dtype: str, objective: Objective, limits: Limits
) -> list[Point]:
    """A point for every combination; a machine that can't have so many devices only costs its own points.

    Raises `UserError` for a model or machine that is not known at all.
    """
    from hyperparallel.cli.planning import Wanted, job_of
    from hyperparallel.cluster.load import load_cluster
    from hyperparallel.errors import ClusterError, PlanError
    from hyperparallel.planner.search.fixed import check_fixed
    from hyperparallel.planner.sweep import combinations, impossible, point_of
    from hyperparallel.workload.presets import load_model

    names = {"model": {word: load_model(word).name for word in values["model"]}}
    names["cluster"] = {word: load_cluster(word).name for word in values["cluster"]}
    points = []
    for one in combinations(values):
        try:
            job = job_of(Wanted(**one, dtype=dtype))
            check_fixed(job, limits)
        except (ClusterError, PlanError) as error:
            own = {what: known[one[what]] for what, known in names.items()}
            points.append(impossible({**one, **own}, error))
            continue
        points.append(point_of(job, objective, limits))
    return points


def words_of(option: str, text: str) -> list[str]:
    """
    >>> words_of("--cluster", "a100, h100")
    ['a100', 'h100']
    """
    from hyperparallel.errors import UserError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UserError(option, text, "one name or several with commas between")
    return list(dict.fromkeys(words))


def numbers_of(option: str, text: str | None) -> list[Any]:
    """Whole numbers of 1 or more with commas between; [None] where nothing is given.

    >>> numbers_of("--seq", "4096,8192")
    [4096, 8192]
    """
    from hyperparallel.errors import UserError

    if text is None:
        return [None]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        allowed = "1 or more, or several such numbers with commas between"
        raise UserError(option, text, allowed, f"{option} {LIST_EXAMPLES[option]}")
    return list(dict.fromkeys(int(word) for word in words))


def print_points(points: Sequence[Point]) -> None:
    """Print a row for each point, and below them what the rows refer to."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hyperparallel.planner.sweep import NUMBERS, TITLES, captions, noted, point_rows

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    table = Table(box=box.SIMPLE_HEAD)
    for name in TITLES:
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in point_rows(points):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for number, note in enumerate(noted(points), 1):
        console.print(Text(f"note {number} {note}"))
    for text in captions(points):
        console.print(Text(text))
