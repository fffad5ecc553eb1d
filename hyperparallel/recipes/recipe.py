"""A recipe: a model, how its run is configured, and the layouts that suit it on a given mesh.

The layouts stand beside the model, never in it. torch is imported by the model's builder only, so
that recipes can be listed and read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from hyperparallel.train.config import TrainConfig


@dataclass(frozen=True)
class Recipe:
    """What to train.

    model: builds the module from the run's config; under a meta default device without weights.
    declare: the plan for a mesh when the user gives none. fields: of `TrainConfig`, where they
    differ from its defaults.
    """

    name: str
    model: Callable[[TrainConfig], nn.Module]
    declare: Callable[[Mesh], Plan] = Plan
    fields: Mapping[str, Any] = field(default_factory=dict)
