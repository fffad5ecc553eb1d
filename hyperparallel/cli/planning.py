"""The planner's side of `hyperparallel plan`: a model and a machine in, plans out; loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyperparallel.errors import NOTHING, UserError, nearest

if TYPE_CHECKING:
    from hyperparallel.planner.job import PlanningJob
    from hyperparallel.planner.planning import Planning

SEARCHED = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "microbatch", "virtual", "schedule"),
    *("zero", "sp", "recompute", "offload", "order"),
)
FOLLOWING = ("ep", "etp", "schedule")
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
    from hyperparallel.planner.strategy import Strategy

    usual = Strategy()
    found: dict[str, Any] = {}
    for word in text.split(",") if text else ():
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in SEARCHED or not equals:
            near = name if name in SEARCHED else nearest(name, SEARCHED, 1)
            example = f"{near}={value or _usual_word(getattr(usual, near))}" if near else None
            allowed = f"field=value, the field one of {', '.join(SEARCHED)}"
            raise UserError("--fix", word.strip() or NOTHING, allowed, example)
        if name in found:
            raise UserError("--fix", word, f"{name} only once")
        found[name] = _fixed_value(name, word, value, getattr(usual, name))
    return tuple(found.items())


def _fixed_value(name: str, word: str, text: str, usual: Any) -> Any:
    """The value of one field, read as the kind that the usual value is of; `UserError` names both."""
    from hyperparallel.planner.search.fixed import check_value
    from hyperparallel.planner.strategy import Strategy

    if isinstance(usual, bool):
        if text.lower() not in ("true", "false"):
            raise UserError("--fix", word, f"{name}=true or {name}=false", f"{name}=true")
        return text.lower() == "true"
    kind = type(usual)
    try:
        value = kind(text)
    except ValueError:
        words = "a whole number" if kind is int else "a number"
        raise UserError("--fix", word, f"{words} after {name}=", f"{name}={_usual_word(usual)}") from None
    check_value(name, value)
    try:
        if name not in FOLLOWING:
            Strategy(**{name: value})
    except UserError as error:
        raise UserError("--fix", word, error.allowed, f"{name}={_usual_word(usual)}") from None
    return value


def _usual_word(usual: Any) -> str:
    """A value of a field, as it is typed; 2 for sizes, which are 1 where nothing is spread."""
    if isinstance(usual, bool):
        return "true"
    return "2" if isinstance(usual, int) else str(usual)


def job_of(wanted: Wanted) -> PlanningJob:
    """The job that is asked for; `UserError` for a model, machine or number that is not known."""
    from hyperparallel.cluster.load import load_cluster
    from hyperparallel.planner.job import PlanningJob, default_batch, default_seq
    from hyperparallel.workload.presets import load_model

    for option, value, usual in (("--seq", wanted.seq, 4096), ("--global-batch", wanted.global_batch, 256)):
        if value is not None and value < 1:
            raise UserError(option, value, "a whole number of at least 1", f"{option} {usual}")
    model = load_model(wanted.model)
    cluster = load_cluster(wanted.cluster, wanted.devices)
    seq = default_seq(model) if wanted.seq is None else wanted.seq
    batch = wanted.global_batch
    batch = default_batch(seq, cluster.num_devices) if batch is None else batch
    return PlanningJob(model, cluster, seq, batch, wanted.dtype)


def planned(wanted: Wanted) -> Planning:
    """Plan what is asked for."""
    from hyperparallel.planner.planning import plan_job
    from hyperparallel.planner.search.fixed import check_fixed
    from hyperparallel.planner.search.search import OBJECTIVES
    from hyperparallel.planner.search.space import Limits

    objective = next((known for known in OBJECTIVES if known == wanted.objective), None)
    if objective is None:
        near = nearest(wanted.objective, OBJECTIVES, 1)
        raise UserError("--objective", wanted.objective, ", ".join(OBJECTIVES), near)
    job, limits = job_of(wanted), Limits(wanted.runnable, wanted.fixed)
    check_fixed(job, limits)
    return plan_job(job, objective, limits, top=wanted.top)


def run_planner(
    wanted: Wanted, save: Path | None, html: Path | None, as_json: Path | None, trace: Path | None
) -> None:
    """Plan, print the table and write the files that were asked for, those that can be."""
    from hyperparallel.cli.request import write_all, write_text

    if save is not None and save.suffix not in (".yaml", ".yml"):
        raise UserError("--save", str(save), "a name ending in .yaml or .yml")
    planning = planned(wanted)
    print_planning(planning)
    machine = planning.job.cluster
    if wanted.devices is None and not machine.fabric:
        from hyperparallel.cluster.fabric import EXAMPLE_TIER

        typer.echo(f"note: {machine.name} has no fabric, so this plans one device; more need {EXAMPLE_TIER}")

    def write_plan(path: Path) -> str:
        from hyperparallel.planner.runnable import num_micro_batches, to_plan

        strategy = planning.best.prediction.strategy
        write_text(path, to_plan(planning.job.model, strategy).to_yaml(), "--save")
        count = num_micro_batches(strategy, planning.job.global_batch)
        return f"saved {path} (train with accumulate={count}, batch_size={planning.job.global_batch})"

    def write_json(path: Path) -> str:
        from hyperparallel.planner.explain.rows import to_json

        write_text(path, to_json(planning), "--json")
        return f"saved {path}"

    def write_page(path: Path) -> str:
        from hyperparallel.planner.explain.page import planning_page

        write_text(path, planning_page(planning), "--html")
        return f"saved {path}"

    def write_trace(path: Path) -> str:
        from hyperparallel.simulate.trace import to_chrome_trace

        simulated = planning.best.simulated
        assert simulated is not None, "the best plan is always simulated"
        write_text(path, to_chrome_trace(simulated.timeline), "--trace")
        return f"saved {path}"

    write_all(((save, write_plan), (as_json, write_json), (html, write_page), (trace, write_trace)))


def print_planning(planning: Planning) -> None:
    """Print the table of plans and what is to say about them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hyperparallel.planner.explain.rows import PLAN_COLUMNS, lines, rows, title

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    console.print(Text(title(planning), "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    for column in PLAN_COLUMNS:
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=column != "plan")
    for row in rows(planning):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for line in lines(planning):
        console.print(Text(line))
