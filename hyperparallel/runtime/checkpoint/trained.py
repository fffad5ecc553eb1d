"""A model with its optimizer in and out of a folder, one call each; every rank makes the same call.

What is saved on one mesh loads on any other, on one device too. A `TrainStep` stands for its model and
optimizer. These are the usual steps over `Checkpointer` and `safetensors.py` with the ranks of the default
process group; a loop that saves while it trains keeps a `Checkpointer` of its own (`train/loop.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperparallel.errors import UserError
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer, Loaded
from hyperparallel.runtime.checkpoint.model import (
    bare_path,
    module_parameters,
    module_state,
    optimizer_state,
    prepare_optimizer,
    restore_settings,
)
from hyperparallel.runtime.checkpoint.record import Local, StateValue
from hyperparallel.runtime.checkpoint.safetensors import Matched, export_module, fill_state
from hyperparallel.runtime.module.step import TrainStep

Trained = nn.Module | TrainStep
_OPTIMIZER = "optimizer"
"""Where the optimizer's settings stand among the saved facts."""


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: Trained,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> None:
    """Save a model, and its optimizer, as the checkpoint of `step` in `folder`; returns when it is there.

    model: any module, a parallelized one, or a `TrainStep`, which brings its optimizer. meta: facts of your
    own that JSON can hold. keep: how many checkpoints stay (0: all). Raises `CheckpointError` for what can't
    be saved and `RunError` where another rank failed; what was saved before is kept.

    >>> import tempfile, torch, hyperparallel as hp
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 2)
    >>> hp.save_checkpoint(folder, 10, model, torch.optim.SGD(model.parameters()), meta={"tokens": 640})
    >>> hp.load_checkpoint(folder, torch.nn.Linear(2, 2)).meta["tokens"]
    640
    """
    module, parameters, used = _parts(model, optimizer)
    state, aliases = module_state(module)
    facts = dict(meta or {})
    if _OPTIMIZER in facts:
        raise UserError("meta", _OPTIMIZER, "other names: that one holds the optimizer's settings")
    if used is not None:
        moments, facts[_OPTIMIZER] = optimizer_state(parameters, used)
        state |= moments
    rank, world = _place()
    with Checkpointer(folder, rank=rank, world=world, keep=keep) as keeper:
        keeper.save(step, state, facts, aliases)


def load_checkpoint(
    folder: str | Path,
    model: Trained,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
) -> Loaded:
    """Fill a model, and its optimizer, in place from the checkpoint of `step` (None: the newest).

    The mesh and the number of ranks may be others than those that saved it. strict: names that only one side
    has are an error, else they are returned. Raises `CheckpointError` for damage and for what does not fit.

    >>> import tempfile, torch, hyperparallel as hp
    >>> folder, old, new = tempfile.mkdtemp(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> hp.save_checkpoint(folder, 10, old)
    >>> hp.load_checkpoint(folder, new).step, torch.equal(old.weight, new.weight)
    (10, True)
    """
    module, parameters, used = _parts(model, optimizer)
    rank, world = _place()
    with Checkpointer(folder, rank=rank, world=world) as keeper:
        index = keeper.read_index(keeper.newest() if step is None else step)
        state, aliases = module_state(module)
        if used is not None:
            state |= prepare_optimizer(parameters, used, index)
        loaded = keeper.load(state, step=index.step, strict=strict, aliases=aliases)
    if used is not None and _OPTIMIZER in loaded.meta:
        restore_settings(parameters, used, loaded.meta[_OPTIMIZER])
    return loaded


def save_safetensors(folder: str | Path, model: Trained) -> None:
    """Write a model's whole weights to a new folder as Hugging Face does, from any mesh, nothing gathered.

    `config.json` is written too where the model has one, so that `from_pretrained(folder)` reads it. Raises
    `CheckpointError` for a folder that has something in it.

    >>> import tempfile, torch, hyperparallel as hp
    >>> folder = tempfile.mkdtemp()
    >>> hp.save_safetensors(folder, torch.nn.Linear(2, 2))
    >>> sorted(path.name for path in Path(folder).iterdir())
    ['model.safetensors']
    """
    module, _, _ = _parts(model, None)
    rank, world = _place()
    export_module(module, folder, rank=rank, world=world)


def load_safetensors(
    folder: str | Path, model: Trained, *, strict: bool = True, cast: bool = False
) -> Matched:
    """Fill a model in place from a folder of safetensors files; each rank reads only what it holds.

    strict: names that only one side has are an error, else they are returned. cast: take other dtypes too.

    >>> import tempfile, torch, hyperparallel as hp
    >>> folder, old, new = tempfile.mkdtemp(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> hp.save_safetensors(folder, old)
    >>> hp.load_safetensors(folder, new)
    Matched(missing=(), unexpected=())
    >>> torch.equal(old.weight, new.weight)
    True
    """
    module, _, _ = _parts(model, None)
    state, aliases = module_state(module)
    named = {name.removeprefix("model/"): value for name, value in state.items()}
    others = {alias.removeprefix("model/"): name.removeprefix("model/") for alias, name in aliases.items()}
    rank, world = _place()
    return fill_state(folder, named, rank=rank, world=world, strict=strict, cast=cast, aliases=others)


def step_parameters(step: TrainStep) -> dict[str, StateValue]:
    """What the optimizer of a `TrainStep` works on: by path, this rank's piece of each parameter."""
    _, aliases = module_state(step.model)
    parameters: dict[str, StateValue] = {}
    for name, tensor in step.params.items():
        spec, path = step.specs[name], f"model/{bare_path(name)}"
        # A checkpoint has a tied weight under its first path; the step may know it by another.
        path = aliases.get(path, path).removeprefix("model/")
        parameters[path] = Local(tensor, spec.layout(), spec.shape)
    return parameters


def _parts(
    model: Any, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, Mapping[str, StateValue], torch.optim.Optimizer | None]:
    """The module, what an optimizer works on by path, and the optimizer if there is one."""
    if isinstance(model, TrainStep):
        if optimizer is not None:
            raise UserError("optimizer", type(optimizer).__name__, "none: a TrainStep brings its own")
        return model.model, step_parameters(model), model.optimizer
    if not isinstance(model, nn.Module):
        raise UserError("model", type(model).__name__, "a torch.nn.Module or a hyperparallel.TrainStep")
    return model, dict(module_parameters(model)), optimizer


def _place() -> tuple[int, int]:
    """(rank, ranks) of the default process group; one rank without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
