"""A recipe: a model, how its run is configured, and the layouts that suit it on a given mesh.

The layouts stand beside the model, never in it. torch is imported by the model's builder only, so
that recipes can be listed and read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyperparallel.errors import UserError, nearest
from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import BATCH_NAMES, Plan

if TYPE_CHECKING:
    from torch import nn

    from hyperparallel.train.config import TrainConfig


def check_axes(mesh: Mesh) -> None:
    """Refuse a mesh with an axis that no recipe of this package cuts anything over.

    >>> check_axes(Mesh((2, 2), ("dp", "tq")))
    Traceback (most recent call last):
    hyperparallel.errors.UserError: mesh axis: got 'tq'; allowed: a batch axis (dp, ddp, fsdp, data, batch,
    replica) or tp; write tp instead
    """
    known = (*Plan(mesh).batch_axes, "tp")
    for name, size in zip(mesh.names, mesh.shape, strict=True):
        if size > 1 and name not in known:
            allowed = f"a batch axis ({', '.join(BATCH_NAMES)}) or tp"
            raise UserError("mesh axis", name, allowed, nearest(name, (*BATCH_NAMES, "tp"), 1))


@dataclass(frozen=True)
class Recipe:
    """What to train.

    model: builds the module from the run's config; under a meta default device without weights.
    declare: the plan for a mesh when the user gives none. fields: of `TrainConfig`, where they
    differ from its defaults. settled: those that the model itself settles, which no run may change.
    """

    name: str
    model: Callable[[TrainConfig], nn.Module]
    declare: Callable[[Mesh], Plan] = Plan
    fields: Mapping[str, Any] = field(default_factory=dict)
    settled: tuple[str, ...] = ()
