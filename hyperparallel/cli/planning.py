"""The planner's side of `hyperparallel plan`: a model and a machine in, plans out; loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyperparallel.errors import UserError

if TYPE_CHECKING:
    from hyperparallel.plan.search.job import Job
    from hyperparallel.plan.search.planner import Planning

SEARCHED = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "microbatch", "virtual", "schedule"),
    *("zero", "sp", "recompute", "offload", "order"),
)
FOLLOWING = ("ep", "etp")
"""Fields whose values depend on others, so that they can't be checked alone."""


@dataclass(frozen=True)
class Wanted:
    """What the command line asked of the planner."""

    model: str
    cluster: str
    devices: int | None = None
    seq: int | None = None
    global_batch: int | None = None
    objective: str = "time"
    dtype: str = "bf16"
    top: int = 5
    runnable: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()


def read_fixed(text: str | None) -> tuple[tuple[str, Any], ...]:
    """Fields of a strategy from `tp=8,zero=1,recompute=none`; `UserError` for what is no field or value.

    >>> read_fixed("tp=8,sp=true,schedule=1f1b")
    (('tp', 8), ('sp', True), ('schedule', '1f1b'))
    """
    from hyperparallel.errors import nearest
    from hyperparallel.plan.strategy import Strategy

    usual = Strategy()
    kinds: dict[str, Any] = {name: type(getattr(usual, name)) for name in SEARCHED}
    found: list[tuple[str, Any]] = []
    for word in text.split(",") if text else ():
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name not in kinds:
            near = nearest(name, kinds, 1)
            raise UserError("--fix", word, f"field=value, the field one of {', '.join(kinds)}", near)
        try:
            given: Any = value == "true" if kinds[name] is bool else kinds[name](value)
            if name not in FOLLOWING:
                Strategy(**{name: given})
        except ValueError as error:
            raise UserError("--fix", word, str(error)) from None
        found.append((name, given))
    return tuple(found)


def job_of(wanted: Wanted) -> Job:
    """The job that is asked for; `UserError` for a model, machine or number that is not known."""
    from hyperparallel.cluster.cluster import Cluster
    from hyperparallel.plan.search.job import Job, default_batch, default_seq
    from hyperparallel.workload.presets import load_model

    model = load_model(wanted.model)
    cluster = Cluster.load(wanted.cluster, wanted.devices)
    seq = wanted.seq or default_seq(model)
    batch = wanted.global_batch or default_batch(seq, cluster.num_devices)
    return Job(model, cluster, seq, batch, wanted.dtype)


def planned(wanted: Wanted) -> Planning:
    """Plan what is asked for."""
    from hyperparallel.plan.search.find import OBJECTIVES
    from hyperparallel.plan.search.planner import plan_job
    from hyperparallel.plan.search.space import Limits

    objective = next((known for known in OBJECTIVES if known == wanted.objective), None)
    if objective is None:
        raise UserError("--objective", wanted.objective, ", ".join(OBJECTIVES))
    return plan_job(job_of(wanted), objective, Limits(wanted.runnable, wanted.fixed), top=wanted.top)


def run_planner(
    wanted: Wanted, save: Path | None, html: Path | None, as_json: Path | None, trace: Path | None
) -> None:
    """Plan, print the table and write the files that were asked for."""
    from hyperparallel.cli.request import write_text

    if save is not None and save.suffix not in (".yaml", ".yml"):
        raise UserError("--save", str(save), "a name ending in .yaml or .yml")
    planning = planned(wanted)
    print_planning(planning)
    if save is not None:
        from hyperparallel.plan.search.runnable import to_plan

        strategy = planning.best.prediction.strategy
        write_text(save, to_plan(planning.job.model, strategy).to_yaml(), "--save")
        count = planning.job.global_batch // (strategy.dp * strategy.microbatch)
        many = "micro-batch" if count == 1 else "micro-batches"
        typer.echo(f"saved {save} (train with {count} {many} a step)")
    if as_json is not None:
        from hyperparallel.plan.search.report import to_json

        write_text(as_json, to_json(planning), "--json")
        typer.echo(f"saved {as_json}")
    if html is not None:
        from hyperparallel.plan.search.page import planning_page

        write_text(html, planning_page(planning), "--html")
        typer.echo(f"saved {html}")
    if trace is not None:
        from hyperparallel.plan.simulate.trace import to_chrome_trace

        simulated = planning.best.simulated
        assert simulated is not None, "the best plan is always simulated"
        write_text(trace, to_chrome_trace(simulated.timeline), "--trace")
        typer.echo(f"saved {trace}")


def print_planning(planning: Planning) -> None:
    """Print the table of plans and what is to say about them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hyperparallel.plan.search.report import COLUMNS, lines, rows, title

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    console.print(Text(title(planning), "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=column != "plan")
    for row in rows(planning):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for line in lines(planning):
        console.print(Text(line))
