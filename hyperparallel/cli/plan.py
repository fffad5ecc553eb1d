"""`hyperparallel plan`: derive a plan without devices, print it, save it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyperparallel.cli.options import Fields, MeshText, Model, PlanFile


def plan(
    model: Model,
    fields: Fields = None,
    mesh: MeshText = None,
    plan: PlanFile = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write what was derived (.json), or only what was declared (.yaml)."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows the plan.")] = None,
) -> None:
    """Derive the distributed program of a model and say what it communicates; no device needed."""
    from hyperparallel.cli.request import derive_request, read_request, write_text
    from hyperparallel.cli.tables import print_derived
    from hyperparallel.errors import UserError

    if save is not None and save.suffix not in (".json", ".yaml", ".yml"):
        raise UserError("--save", str(save), "a name ending in .json, .yaml or .yml")
    request = read_request(model, mesh=mesh, plan=plan, overrides=fields or [])
    derived = derive_request(request)
    print_derived(derived)
    if save is not None:
        text = derived.to_json() if save.suffix == ".json" else request.plan.to_yaml()
        write_text(save, text, "--save")
        typer.echo(f"saved {save}")
    if html is not None:
        from hyperparallel.plan.page import html_page

        write_text(html, html_page(derived, request.recipe.name), "--html")
        typer.echo(f"saved {html}")
