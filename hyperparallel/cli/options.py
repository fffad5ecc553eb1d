"""The arguments that commands share, and how a mesh and `key=value` words are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperparallel.errors import UserError

if TYPE_CHECKING:
    from hyperparallel.layout import Mesh

MODEL_HELP = "Recipe, folder with a Hugging Face config.json, or module:function."
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP)]
FieldWords = Annotated[
    list[str] | None,
    typer.Argument(help="Fields of the run's config: batch_size=16 lr=3e-4.", metavar="KEY=VALUE"),
]
MeshText = Annotated[
    str | None, typer.Option("--mesh", help="Axes and sizes, outermost first: dp=2,tp=2.")
]
PlanFileOption = Annotated[
    Path | None,
    typer.Option("--plan", help="Plan file (YAML) of declared layouts; none: the recipe's own."),
]


def parse_mesh(text: str) -> Mesh:
    """A mesh from `dp=2,tp=2`, the first axis outermost; `UserError` where it reads otherwise.

    >>> parse_mesh("dp=2,tp=4").shape
    (2, 4)
    """
    from hyperparallel.layout import Mesh

    names, sizes = [], []
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not name.strip() or not size.strip().isdecimal():
            raise UserError("--mesh", text, "axis=size pairs with commas between", "dp=2,tp=2")
        names.append(name.strip())
        sizes.append(int(size))
    return Mesh(tuple(sizes), tuple(names))


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
    """`key=value` words as a mapping; values stay text, the config's types read them.

    >>> parse_overrides(["seed=3", "optimizer.lr=1e-3"])
    {'seed': '3', 'optimizer.lr': '1e-3'}
    """
    read = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError("override", word, "key=value, key being a field of the config")
        if key in read:
            raise UserError("override", word, f"{key} only once")
        read[key] = value
    return read
