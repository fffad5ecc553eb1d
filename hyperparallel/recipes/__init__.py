"""Recipes: Python functions that say what to train, found by name.

A recipe is a run's example and its integration test as well: `hyperparallel train llama_demo`.
"""

from hyperparallel.recipes.find import find_recipe, names
from hyperparallel.recipes.recipe import Recipe

__all__ = ["Recipe", "find_recipe", "names"]
