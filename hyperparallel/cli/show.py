"""`hyperparallel show`: layouts and collectives of a model or a saved plan, as tables or a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperparallel.cli.options import MODEL_HELP, FieldWords, MeshText, PlanFileOption

if TYPE_CHECKING:
    from hyperparallel.plan.derived import Derived


def show(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP} Or a plan saved as .json.")],
    fields: FieldWords = None,
    mesh: MeshText = None,
    plan: PlanFileOption = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    explain: Annotated[
        str | None, typer.Option(help="Say why this parameter, input or value lies so; or count rewrites.")
    ] = None,
) -> None:
    """Draw the layouts of a model: tables here, or a page with its block diagram."""
    from hyperparallel.cli.request import DERIVED_FROM, derive_request, read_request, write_text

    if model.endswith(".json"):
        _refuse_changes({"KEY=VALUE": fields, "--mesh": mesh, "--plan": plan})
        derived, title = _read(Path(model)), Path(model).stem
    else:
        request = read_request(model, mesh=mesh, plan=plan, overrides=fields or [], used=DERIVED_FROM)
        derived, title = derive_request(request), request.recipe.name
    if explain is not None:
        typer.echo(derived.explain(explain))
    if html is not None:
        from hyperparallel.plan.page import html_page

        write_text(html, html_page(derived, title), "--html")
        typer.echo(f"saved {html}")
    if html is None and explain is None:
        from hyperparallel.cli.tables import print_derived

        print_derived(derived)


def _refuse_changes(asked: Mapping[str, object]) -> None:
    """Refuse what would change a program that is saved as it is."""
    from hyperparallel.errors import UserError

    for name, value in asked.items():
        if value:
            given = " ".join(value) if isinstance(value, list) else str(value)
            raise UserError(name, given, "none beside a saved program, which is shown as it is")


def _read(path: Path) -> Derived:
    from hyperparallel.errors import PlanError, UserError
    from hyperparallel.plan.derived import Derived

    try:
        return Derived.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("plan", str(path), f"a readable file ({error.strerror})") from None
    except (PlanError, UnicodeDecodeError):
        allowed = "the program that `hyperparallel plan MODEL --mesh dp=2,tp=2 --save FILE.json` saves"
        raise UserError("plan", str(path), allowed) from None
