"""`hyperparallel sweep`: the best plan over machines, sizes, sequences, batches or models, with a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hyperparallel.plan.search.sweep import Point

Values = Annotated[str | None, typer.Option(help="One value or several with commas between.")]
EXAMPLES = {"--devices": "8,16,32", "--seq": "4096,8192", "--global-batch": "512,1024"}


def sweep(
    model: Annotated[str, typer.Argument(help="Model presets or config.json files, with commas between.")],
    cluster: Annotated[str, typer.Option(help="Machines: presets or files, with commas between.")],
    devices: Values = None,
    seq: Values = None,
    global_batch: Values = None,
    objective: Annotated[str, typer.Option(help="time or memory.")] = "time",
    dtype: Annotated[str, typer.Option(help="Format of the matrix products.")] = "bf16",
    runnable: Annotated[bool, typer.Option("--runnable", help="Only what the executor runs today.")] = False,
    fix: Annotated[str | None, typer.Option(help="Fields of the strategy: tp=8,zero=1.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the rows as JSON.")] = None,
) -> None:
    """Plan every combination of the given values and show how the best plan changes."""
    from hyperparallel.cli.planning import Wanted, job_of, read_fixed
    from hyperparallel.cli.request import write_text
    from hyperparallel.errors import UserError
    from hyperparallel.plan.search.find import OBJECTIVES
    from hyperparallel.plan.search.space import Limits
    from hyperparallel.plan.search.sweep import combinations, page, to_csv, to_json
    from hyperparallel.plan.search.sweep import sweep as swept

    known = next((one for one in OBJECTIVES if one == objective and one != "cost"), None)
    if known is None:
        raise UserError("--objective", objective, "time or memory")
    values: dict[str, list[Any]] = {
        "model": words_of("MODEL", model),
        "cluster": words_of("--cluster", cluster),
        "devices": numbers_of("--devices", devices),
        "seq": numbers_of("--seq", seq),
        "global_batch": numbers_of("--global-batch", global_batch),
    }
    jobs = [job_of(Wanted(**one, dtype=dtype)) for one in combinations(values)]
    points = swept(jobs, known, Limits(runnable, read_fixed(fix)))
    print_points(points)
    title = f"{model} on {cluster}"
    written = ((html, "--html", page(points, title)), (csv, "--csv", to_csv(points)),
               (as_json, "--json", to_json(points)))  # fmt: skip
    for path, option, text in written:
        if path is not None:
            write_text(path, text, option)
            typer.echo(f"saved {path}")


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
        raise UserError(option, text, allowed, f"{option} {EXAMPLES[option]}")
    return list(dict.fromkeys(int(word) for word in words))


def print_points(points: Sequence[Point]) -> None:
    """Print a row for each point."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hyperparallel.plan.words import bytes_words, seconds_words

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    table = Table(box=box.SIMPLE_HEAD)
    numbers = ("devices", "seq", "batch", "step", "tokens/s/device", "MFU", "memory")
    for name in ("model", "cluster", *numbers, "plan"):
        table.add_column(name, justify="right" if name in numbers else "left")
    for point in points:
        row, p = point.record(), point.best
        cells = [row["model"], row["cluster"]]
        cells += [f"{row[name]:,}" for name in ("devices", "seq", "global_batch")]
        if p is None:
            cells += ["", "", "", "", point.missing]
        else:
            cells += [seconds_words(p.seconds), f"{row['tokens_s_device']:,.0f}", f"{row['mfu']:.1%}",
                      bytes_words(p.peak_bytes), row["plan"]]  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
