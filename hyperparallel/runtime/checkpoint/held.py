"""What a rank holds of a model and its optimizer, as a checkpoint's state: of a module or of a step.

The ranks that save together are those that hold the model: of a mesh, or of all parts; without one, all of
the job. Where they are not all, they are numbered by their place among themselves, in layouts too, and agree
through a corner of the job's store that is their own. Of a model in parts, every rank lists the tensors of
all parts, and the settings of all parts' optimizers are brought together: a checkpoint is one of the whole
model, whatever ran it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store  # torch 2.13

from hyperparallel.errors import UserError
from hyperparallel.layout import Mesh
from hyperparallel.runtime.checkpoint.index import Index
from hyperparallel.runtime.checkpoint.model import (
    MODEL,
    bare_path,
    module_parameters,
    module_state,
    moments_elsewhere,
    optimizer_state,
    prepare_optimizer,
    restore_settings,
)
from hyperparallel.runtime.checkpoint.record import Local, StateValue, as_local
from hyperparallel.runtime.comm.group import job_timeout
from hyperparallel.runtime.comm.groups import DEFAULT_TIMEOUT
from hyperparallel.runtime.comm.meeting import meet_members
from hyperparallel.runtime.module.parallel import ParallelModule
from hyperparallel.runtime.module.parts import PartsStep
from hyperparallel.runtime.module.step import TrainStep

Trained = nn.Module | TrainStep | PartsStep


@dataclass(frozen=True)
class Held:
    """This rank's part of a checkpoint.

    parameters: what an optimizer works on, by path. optimizer: None where there is none, or none on this
    rank. state, aliases: of the module, see `module_state`. ranks: the job's numbers of those that hold the
    model. in_parts: other ranks may hold other parameters.
    """

    module: nn.Module
    parameters: Mapping[str, StateValue]
    optimizer: torch.optim.Optimizer | None
    state: Mapping[str, StateValue]
    aliases: Mapping[str, str]
    ranks: tuple[int, ...]
    in_parts: bool = False

    @property
    def place(self) -> int:
        """This rank's place among `ranks`."""
        return self.ranks.index(_job()[0])

    @property
    def store(self) -> Store | None:
        """Where these ranks agree; None: in the job's store, as all of its ranks."""
        if len(self.ranks) in (1, _job()[1]):
            return None
        return PrefixStore("/".join(("ranks", *map(str, self.ranks))), _get_default_store())

    def model_state(self) -> dict[str, StateValue]:
        """The module's tensors by name."""
        return self._numbered(self.state)

    def to_save(self) -> tuple[dict[str, StateValue], dict[str, Any] | None]:
        """The tensors of the module and optimizer, and the optimizer's other facts; None without one."""
        moments: dict[str, StateValue] = {}
        facts: dict[str, Any] | None = None
        if self.optimizer is not None:
            moments, facts = optimizer_state(self.parameters, self.optimizer)
        return self._numbered({**self.state, **moments}), self._together(facts) if self.in_parts else facts

    def to_fill(self, index: Index) -> dict[str, StateValue]:
        """The tensors to load from a checkpoint; the optimizer's are allocated."""
        moments: dict[str, StateValue] = {}
        if self.optimizer is not None:
            moments = prepare_optimizer(self.parameters, self.optimizer, index)
        if self.in_parts:
            locals_ = {path: as_local(path, value) for path, value in self.parameters.items()}
            moments |= moments_elsewhere(locals_, index, _job()[0])
        return self._numbered({**self.state, **moments})

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Put back what `to_save` gave beside the tensors."""
        if self.optimizer is not None:
            restore_settings(self.parameters, self.optimizer, facts)

    def _together(self, facts: dict[str, Any] | None) -> dict[str, Any]:
        """The settings of all ranks' optimizers: each knows those of its own parts."""
        mine = facts or {"groups": [], "numbers": {}}
        if len(self.ranks) == 1:
            return mine
        place = f"checkpoint/settings/{'-'.join(map(str, self.ranks))}"
        word, seconds = json.dumps(mine), job_timeout(DEFAULT_TIMEOUT).total_seconds()
        why = "save the optimizer's settings"
        told = meet_members(place, _job()[0], self.ranks, word, seconds, why)
        found: dict[str, Any] = {"groups": [], "numbers": {}}
        for each in dict.fromkeys(told):  # ranks of one part tell the same
            theirs = json.loads(each)
            found["groups"] += theirs["groups"]
            found["numbers"] |= theirs["numbers"]
            if "kind" in theirs:  # not of a rank without trained parameters
                found["kind"] = theirs["kind"]
        return found

    def _numbered(self, state: Mapping[str, StateValue]) -> dict[str, StateValue]:
        if self.ranks == tuple(range(len(self.ranks))):
            return dict(state)
        return {name: _among(as_local(name, value), self.ranks) for name, value in state.items()}


def held_of(model: Any, optimizer: torch.optim.Optimizer | None = None) -> Held:
    """What this rank holds of a module with its optimizer, or of a step.

    Raises `UserError` for anything else, and for an optimizer beside a step.
    """
    if isinstance(model, (TrainStep, PartsStep)) and optimizer is not None:
        allowed = f"none: a {type(model).__name__} brings its own"
        raise UserError("optimizer", type(optimizer).__name__, allowed)
    if isinstance(model, PartsStep):
        return _of_parts(model)
    if isinstance(model, TrainStep):
        state, aliases = module_state(model.model)
        ranks = tuple(sorted(model.here.mesh.ranks))
        return Held(model.model, step_parameters(model), model.optimizer, state, aliases, ranks)
    if not isinstance(model, nn.Module):
        allowed = "a torch.nn.Module, a hyperparallel.TrainStep or a hyperparallel.PartsStep"
        raise UserError("model", type(model).__name__, allowed)
    ranks = tuple(range(_job()[1]))
    if isinstance(model, ParallelModule):
        ranks = tuple(sorted(model._parallel.here.mesh.ranks))
    state, aliases = module_state(model)
    return Held(model, dict(module_parameters(model)), optimizer, state, aliases, ranks)


def step_parameters(step: TrainStep | PartsStep) -> dict[str, StateValue]:
    """What the optimizers of a step work on: by path, this rank's piece of each parameter.

    A rank of another part has an empty tensor for it.
    """
    _, aliases = module_state(step.model)
    parameters: dict[str, StateValue] = {}
    for name, spec in step.specs.items():
        path = MODEL + bare_path(name)
        path = aliases.get(path, path).removeprefix(MODEL)
        held: torch.Tensor = torch.empty(0, dtype=step.model.get_parameter(name).dtype)
        if name in step.params:
            held = step.params[name]
        parameters[path] = Local(held, spec.layout(), spec.shape)
    return parameters


def _of_parts(step: PartsStep) -> Held:
    state, aliases = module_state(step.model)
    parameters = step_parameters(step)
    for path, value in parameters.items():
        assert isinstance(value, Local)
        state[MODEL + path] = Local(value.tensor.detach(), value.layout, value.shape)
    for name, mesh in step.changed_buffers.items():  # those that change are known to the ranks of their part
        path = MODEL + bare_path(name)
        path = aliases.get(path, path)
        if path in state:
            buffer = step.model.get_buffer(name)
            held = torch.empty(0, dtype=buffer.dtype) if buffer.is_meta else buffer
            state[path] = Local(held, mesh(*(None for _ in buffer.shape)), tuple(buffer.shape))
    ranks = tuple(step.here.mesh.ranks)
    return Held(step.model, parameters, step.optimizer, state, aliases, ranks, in_parts=True)


def _among(local: Local, ranks: tuple[int, ...]) -> Local:
    """A piece whose layout numbers ranks by their place in `ranks`."""
    if local.layout is None:
        return local
    mesh = local.layout.mesh
    places = Mesh(mesh.shape, mesh.names, [ranks.index(rank) for rank in mesh.ranks])
    return Local(local.tensor, places(*local.layout.dims), local.shape)


def _job() -> tuple[int, int]:
    """(rank, ranks) of the default process group; one rank without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
