"""From what a user calls a model to its recipe: a name, a local folder, or `module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from hyperparallel.errors import UserError, nearest
from hyperparallel.recipes.folder import folder_recipe
from hyperparallel.recipes.llama import llama_demo
from hyperparallel.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {"llama_demo": llama_demo}


def names() -> list[str]:
    """The names of the recipes that come with the package.

    >>> "llama_demo" in names()
    True
    """
    return sorted(RECIPES)


def find_recipe(model: str) -> Recipe:
    """The recipe that `model` names; `UserError` with the nearest names where there is none."""
    if model in RECIPES:
        return RECIPES[model]()
    if Path(model).is_dir():
        return folder_recipe(Path(model))
    module, colon, function = model.partition(":")
    if colon and module and function:
        return _imported(model, module, function)
    allowed = f"a recipe ({', '.join(names())}), a folder with config.json, or module:function"
    raise UserError("model", model, allowed, nearest(model, names()))


def _imported(model: str, module: str, function: str) -> Recipe:
    """The recipe that a function of the user's makes; the working folder is searched first."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError("model", model, f"a module that can be imported ({error})") from None
    except AttributeError:
        raise UserError("model", model, f"a function of {module}") from None
    finally:
        sys.path.remove(str(Path.cwd()))
    recipe = make()
    if not isinstance(recipe, Recipe):
        raise UserError("model", model, "a function that returns a hyperparallel.recipes.Recipe")
    return recipe
