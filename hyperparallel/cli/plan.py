"""`hyperparallel plan`: the best plans of a model on a machine, or what a plan makes of a recipe.

With `--cluster` the planner searches all strategies (`cli/planning.py`); otherwise the distributed program of
a recipe or module is derived for a given mesh, and with `--trace` its step is simulated, on this machine as
`doctor --calibrate` described it or on the cluster that is named. Neither needs a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hyperparallel.cli.options import FieldWords, MeshText, PlanFileOption

PLAN_MODEL_HELP = (
    "With --cluster a model preset or a Hugging Face config.json (or its folder); else a recipe, such a "
    "folder, or module:function."
)
SEARCH = "Search for the best plan"


def plan(
    model: Annotated[str, typer.Argument(help=PLAN_MODEL_HELP)],
    fields: FieldWords = None,
    mesh: MeshText = None,
    plan: PlanFileOption = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write what was derived (.json), or only what was declared (.yaml)."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows the plan.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Machine to plan for: a preset or a cluster file.", rich_help_panel=SEARCH),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices of that machine.", rich_help_panel=SEARCH)
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample.", rich_help_panel=SEARCH)
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step, over all devices.", rich_help_panel=SEARCH)
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="time (else), memory, or cost (device seconds).", rich_help_panel=SEARCH),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Format of the matrix products; else bf16.", rich_help_panel=SEARCH)
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Plans to show; else 5.", rich_help_panel=SEARCH)
    ] = None,
    runnable: Annotated[
        bool, typer.Option("--runnable", help="Only what the executor runs today.", rich_help_panel=SEARCH)
    ] = False,
    fix: Annotated[
        str | None,
        typer.Option(help="Fields of the strategy: tp=8,zero=1,recompute=none.", rich_help_panel=SEARCH),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers.", rich_help_panel=SEARCH)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the simulated step as a Chrome trace.", rich_help_panel=SEARCH),
    ] = None,
) -> None:
    """Find the best plan of a model on a machine (--cluster), or derive the program of a given one."""
    from hyperparallel.errors import UserError

    every: dict[str, Any] = {
        "devices": devices, "seq": seq, "global_batch": global_batch, "objective": objective,
        "dtype": dtype, "top": top, "runnable": runnable or None,
    }  # fmt: skip
    asked = {name: value for name, value in every.items() if value is not None}
    given = trace is not None and (mesh is not None or plan is not None)
    if cluster is not None and not given:
        for name, wrong in (("--mesh", mesh), ("--plan", plan), ("KEY=VALUE", fields)):
            if wrong:
                allowed = "no --cluster, which searches for the mesh itself, or --trace beside --mesh"
                raise UserError(name, str(wrong), allowed)
        from hyperparallel.cli.planning import Wanted, read_fixed, run_planner

        run_planner(Wanted(model, cluster, **asked, fixed=read_fixed(fix)), save, html, as_json, trace)
        return
    _refuse_search({**asked, "fix": fix, "json": as_json})
    _refuse_preset(model)
    _derive(model, fields, mesh, plan, save, html, trace, cluster or "laptop")


def _refuse_search(asked: Mapping[str, Any]) -> None:
    """Refuse options of the search where a given mesh or plan is derived."""
    from hyperparallel.errors import UserError

    for name, value in asked.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            given, words = (value, option) if value is True else (str(value), f"{option} {value}")
            allowed = "where a plan is searched: with --cluster, without --mesh or --plan"
            raise UserError(option, given, allowed, f"--cluster h100 {words}")


def _refuse_preset(model: str) -> None:
    """Say that a machine is missing where the model is one that only the planner knows."""
    from hyperparallel.cluster.presets import PRESETS
    from hyperparallel.errors import NOTHING, UserError
    from hyperparallel.recipes.find import names
    from hyperparallel.workload.presets import preset_name

    if model in names() or Path(model).exists() or preset_name(model) is None:
        return
    allowed = f"the machine to plan {model} for: a file, or one of {', '.join(PRESETS)}"
    raise UserError("--cluster", NOTHING, allowed, f"hyperparallel plan {model} --cluster h100")


def _derive(
    model: str,
    fields: list[str] | None,
    mesh: str | None,
    plan: Path | None,
    save: Path | None,
    html: Path | None,
    trace: Path | None,
    cluster: str,
) -> None:
    """Derive a plan, print it and write the files that were asked for."""
    from hyperparallel.cli.request import (
        DERIVED_FROM,
        PREDICTED_FROM,
        build_request,
        read_request,
        write_all,
        write_text,
    )
    from hyperparallel.cli.tables import print_derived
    from hyperparallel.errors import UserError

    if save is not None and save.suffix not in (".json", ".yaml", ".yml"):
        raise UserError("--save", str(save), "a name ending in .json, .yaml or .yml")
    used = DERIVED_FROM if trace is None else PREDICTED_FROM
    request = read_request(model, mesh=mesh, plan=plan, overrides=fields or [], used=used)
    from hyperparallel.graph.derive import derived as derived_of

    built = build_request(request)
    derived = derived_of(built)
    print_derived(derived)

    def write_plan(path: Path) -> str:
        text = derived.to_json() if path.suffix == ".json" else request.plan.to_yaml()
        write_text(path, text, "--save")
        return f"saved {path}"

    def write_page(path: Path) -> str:
        from hyperparallel.plan.page import html_page

        write_text(path, html_page(derived, request.recipe.name), "--html")
        return f"saved {path}"

    def write_trace(path: Path) -> str:
        from hyperparallel.cli.predict import write_prediction

        return write_prediction(request, built, cluster, path)

    write_all(((save, write_plan), (html, write_page), (trace, write_trace)))
