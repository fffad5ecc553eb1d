"""What `train`, `plan` and `show` are asked for: a recipe, its config and the plan, all read here.

Of the mesh and the plan, the plan file wins where only it is given; where both are given they must
agree. Without either, all ranks are one `dp` axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyperparallel.cli.options import parse_mesh, parse_overrides
from hyperparallel.errors import UserError
from hyperparallel.layout import Mesh
from hyperparallel.plan.derived import Derived
from hyperparallel.plan.plan import Plan
from hyperparallel.recipes import Recipe, find_recipe

if TYPE_CHECKING:
    from hyperparallel.graph.build import Built
    from hyperparallel.train.config import TrainConfig


DERIVED_FROM = ("dtype", "compute", "vocab_size", "batch_size", "seq_len", "accumulate")
"""Fields of a run's config that its program depends on."""
PREDICTED_FROM = (*DERIVED_FROM, "clip_norm", "weight_decay")
"""Those that a simulated step depends on."""


@dataclass(frozen=True)
class Request:
    """A recipe with everything about its run settled."""

    recipe: Recipe
    config: TrainConfig
    plan: Plan


def read_request(
    model: str,
    *,
    mesh: str | None,
    plan: Path | None,
    overrides: Sequence[str],
    devices: int | None = None,
    options: Mapping[str, Any] | None = None,
    used: Collection[str] | None = None,
) -> Request:
    """Settle a request from a command's arguments; `UserError` for what does not fit together.

    used: the fields of the config that the command acts on, left out all; others are refused.
    """
    _refuse_plan_file(model)
    recipe = find_recipe(model)
    settled = settle_plan(recipe, mesh, plan, devices)
    from hyperparallel.train.config import make_config

    given = {key: value for key, value in (options or {}).items() if value is not None}
    written = parse_overrides(overrides)
    for key in given.keys() & written.keys():
        raise UserError("override", f"{key}={written[key]}", f"{key} only once")
    for key in written.keys() & {"model", *recipe.settled}:
        raise UserError("override", f"{key}={written[key]}", f"none: {model} settles {key}")
    _refuse_unused(written, used)
    config = make_config({**recipe.fields, **given, **written})
    compute = config.compute or settled.compute  # either may ask for it; both then say so
    if compute and config.dtype == "float64":
        raise UserError("compute", compute, "none with dtype=float64, which a product would mix with it")
    config = config.model_copy(update={"compute": compute})
    return Request(recipe, config, replace(settled, compute=compute))


def _refuse_unused(written: Mapping[str, str], used: Collection[str] | None) -> None:
    """Refuse fields of a run that change nothing in what a command derives."""
    from hyperparallel.train.config import TrainConfig

    for key, value in written.items():
        if used is not None and key in TrainConfig.model_fields and key not in used:
            allowed = f"in `hyperparallel train`; here a plan depends on {', '.join(used)}"
            raise UserError("override", f"{key}={value}", allowed)


def _refuse_plan_file(model: str) -> None:
    """Say where a saved plan goes that was given as the model."""
    path = Path(model)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return
    try:
        Plan.load(path)
    except (UserError, UnicodeDecodeError):
        return  # no plan either: then it is only no model
    allowed = "a model; this file is a plan, which `hyperparallel show MODEL --plan FILE` shows"
    raise UserError("model", model, allowed, f"MODEL --plan {model}")


def settle_plan(recipe: Recipe, mesh: str | None, plan: Path | None, devices: int | None) -> Plan:
    """The plan that a mesh, a plan file and a number of devices mean together."""
    wanted = parse_mesh(mesh) if mesh else None
    if plan is not None:
        settled = Plan.load(plan)
        if wanted is not None and settled.mesh != wanted:
            raise UserError("--mesh", mesh, f"the mesh of {plan}: {settled.mesh}", "no --mesh")
    else:
        settled = recipe.declare(wanted or Mesh((devices or 1,), ("dp",)))
    if devices is not None and settled.mesh.size != devices:
        allowed = f"the {settled.mesh.size} ranks of {settled.mesh}"
        raise UserError("--devices", devices, allowed, f"--devices {settled.mesh.size}")
    return settled


def derive_request(request: Request) -> Derived:
    """Derive a request's plan, as `build_request` does."""
    from hyperparallel.graph.derive import derived

    return derived(build_request(request))


def build_request(request: Request) -> Built:
    """Build a request's program on a model without memory; needs torch but no device."""
    import torch

    from hyperparallel.graph.build import build
    from hyperparallel.runtime.module.micro_batches import split_batch

    config = request.config
    with torch.device("meta"):
        model = request.recipe.model(config).to(getattr(torch, config.dtype))
    tokens = torch.zeros((config.batch_size, config.seq_len), dtype=torch.int64)
    batch = split_batch({"input_ids": tokens, "labels": tokens}, config.accumulate)[0]
    return build(model, request.plan, (), batch, loss="loss", micro_batches=config.accumulate)


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file that the user asked for; `UserError` where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(path), f"a path that can be written ({error})") from None


def write_all(files: Iterable[tuple[Path | None, Callable[[Path], str]]]) -> None:
    """Let each writer write its file, where one is wanted, and print what it says.

    One that fails keeps no other from being written: its `UserError` is raised at the end.
    """
    failed: list[UserError] = []
    for path, write in files:
        try:
            if path is not None:
                typer.echo(write(path))
        except UserError as error:
            failed.append(error)
    for further in failed[1:]:
        typer.echo(f"error: {further}", err=True)
    if failed:
        raise failed[0]
