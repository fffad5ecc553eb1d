"""A model with its optimizer in and out of a folder, one call each; every rank makes the same call.

What is saved on one mesh loads on any other, on one device too. A `TrainStep` or `PartsStep` stands for its
model and optimizer (`held.py`). These are the usual steps over `Checkpointer` and `safetensors.py`, made by
the ranks that hold the model; a loop that saves while it trains keeps a `Checkpointer` of its own
(`train/loop.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hyperparallel.errors import CheckpointError, UserError, Words
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer, Loaded
from hyperparallel.runtime.checkpoint.held import Trained, held_of
from hyperparallel.runtime.checkpoint.index import Index
from hyperparallel.runtime.checkpoint.model import MODEL
from hyperparallel.runtime.checkpoint.safetensors import (
    Matched,
    config_files,
    export_safetensors,
    fill_state,
    without_room,
)

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

    model: any module, a parallelized one, or a `TrainStep` or `PartsStep`, which brings its optimizer.
    meta: facts of your own that JSON can hold. keep: how many checkpoints stay (0: all). Raises
    `CheckpointError` for what can't be saved and `RunError` where another rank failed; what was saved before
    is kept.

    >>> import tempfile, torch, hyperparallel as hp
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 2)
    >>> hp.save_checkpoint(folder, 10, model, torch.optim.SGD(model.parameters()), meta={"tokens": 640})
    >>> hp.load_checkpoint(folder, torch.nn.Linear(2, 2)).meta["tokens"]
    640
    """
    held = held_of(model, optimizer)
    given = dict(meta or {})
    if _OPTIMIZER in given:
        raise UserError("meta", _OPTIMIZER, "other names: that one holds the optimizer's settings")
    state, facts = held.to_save()
    if facts is not None:
        given[_OPTIMIZER] = facts
    with Checkpointer(folder, rank=held.place, world=len(held.ranks), store=held.store, keep=keep) as keeper:
        keeper.save(step, state, given, held.aliases)


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
    has are an error, else they are returned; likewise an optimizer without a saved state, or of another kind
    than the saved one, is an error, else left as it is. Raises `CheckpointError` for damage and misfits.

    >>> import tempfile, torch, hyperparallel as hp
    >>> folder, old, new = tempfile.mkdtemp(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> hp.save_checkpoint(folder, 10, old)
    >>> hp.load_checkpoint(folder, new).step, torch.equal(old.weight, new.weight)
    (10, True)
    """
    held = held_of(model, optimizer)
    with Checkpointer(folder, rank=held.place, world=len(held.ranks), store=held.store) as keeper:
        index = keeper.read_index(keeper.newest() if step is None else step)
        if held.optimizer is not None and not _has_state(index, held.optimizer, strict):
            held = replace(held, optimizer=None)
        loaded = keeper.load(held.to_fill(index), step=index.step, strict=strict, aliases=held.aliases)
    if _OPTIMIZER in loaded.meta:
        held.restore(loaded.meta[_OPTIMIZER])
    return loaded


def _has_state(index: Index, optimizer: torch.optim.Optimizer, strict: bool) -> bool:
    """Whether a checkpoint has a state for `optimizer`; with `strict`, `CheckpointError` if not."""
    saved, kind = index.meta.get(_OPTIMIZER), type(optimizer).__name__
    given = "no optimizer" if saved is None else f"the state of {saved.get('kind', kind)}"
    if saved is not None and saved.get("kind", kind) == kind:
        return True
    if strict:
        allowed = f"a checkpoint of step {index.step} that was saved with {kind}"
        raise CheckpointError("optimizer", Words(given), allowed, "strict=False to leave it as it is,")
    return False


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
    held = held_of(model)
    export_safetensors(
        without_room(held.model_state()), folder, rank=held.place, world=len(held.ranks), store=held.store,
        extra_files=config_files(held.module),
    )  # fmt: skip


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
    held = held_of(model)
    others = {alias.removeprefix(MODEL): name.removeprefix(MODEL) for alias, name in held.aliases.items()}
    return fill_state(
        folder, without_room(held.model_state()), rank=held.place, world=len(held.ranks), strict=strict,
        cast=cast, aliases=others,
    )  # fmt: skip
