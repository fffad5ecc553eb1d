"""Modules, optimizers and random generators as checkpoint states, and back.

Names are "model/<path>", "optimizer/<moment>/<path>" and "random/<rank>/<generator>". Paths are
bare: what `torch.compile` and recompute wrappers add is left out, so that a checkpoint does not
depend on them. A tied tensor is saved once, under its first path; its other paths are aliases.
Non-persistent buffers are not saved: they are computed from the configuration.

A rank's generators are saved as its own; a run with more ranks starts the new ones from the states
of the old ones in turn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hyperparallel.errors import CheckpointError
from hyperparallel.runtime.checkpoint.index import Index, TensorEntry
from hyperparallel.runtime.checkpoint.record import Local, StateValue
from hyperparallel.runtime.checkpoint.storage import dtype_of

MODEL = "model/"
"""What the names of a module's tensors begin with."""

_WRAPPER_PARTS = {"_orig_mod", "_checkpoint_wrapped_module"}  # torch 2.13


def bare_path(path: str) -> str:
    """A parameter's path without what wrappers add.

    >>> bare_path("layers.0._checkpoint_wrapped_module._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)


def module_state(module: nn.Module) -> tuple[dict[str, StateValue], dict[str, str]]:
    """Parameters and persistent buffers by name, and alias -> name for the tied ones."""
    state: dict[str, StateValue] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    # keep_vars gives the parameter objects themselves, so that ties are seen by identity
    for path, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # a module's extra state, which is not a tensor
        name = MODEL + bare_path(path)
        known = first.setdefault(id(tensor), name)
        if known == name:
            state[name] = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
        else:
            aliases[name] = known
    return state, aliases


def module_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by bare path, each once, under its first."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (bare_path(path), parameter))
    return dict(found.values())


def optimizer_state(
    parameters: Mapping[str, StateValue], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, StateValue], dict[str, Any]]:
    """The optimizer's tensors by name, and its other facts (settings, counters) for JSON.

    parameters: what the optimizer works on, by path; a `Local` where that is a plain local tensor,
    whose moments are then cut alike. Raises `CheckpointError` when the optimizer has another one.
    """
    paths = _paths(parameters)
    state: dict[str, StateValue] = {}
    numbers: dict[str, Any] = {}
    for parameter, moments in optimizer.state.items():
        path = _path_of(paths, parameter)
        for moment, value in moments.items():
            name = f"optimizer/{moment}/{path}"
            if isinstance(value, torch.Tensor):
                state[name] = _cut_like(parameters[path], moment, value)
            else:
                numbers[name] = value
    groups = []
    for group in optimizer.param_groups:
        settings = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        settings["params"] = [_path_of(paths, parameter) for parameter in group["params"]]
        groups.append(settings)
    return state, {"kind": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def prepare_optimizer(
    parameters: Mapping[str, StateValue], optimizer: torch.optim.Optimizer, index: Index
) -> dict[str, StateValue]:
    """Allocate the moments that a checkpoint has for `optimizer`, and return them for loading.

    A moment with the parameter's shape is laid out like the parameter; another one (a step count)
    is replicated. Then call `restore_settings` with the facts saved beside them.
    """
    moments, paths = _moments(index), _paths(parameters)
    state: dict[str, StateValue] = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            path = _path_of(paths, parameter)
            for moment, name in _saved_moments(moments, index, path):
                value = _empty_moment(moment, index.tensors[name], parameters[path], on_device)
                optimizer.state[parameter][moment] = value
                state[name] = _cut_like(parameters[path], moment, value)
    return state


def moments_elsewhere(parameters: Mapping[str, Local], index: Index, rank: int) -> dict[str, StateValue]:
    """The moments that a checkpoint has of parameters whose mesh `rank` is not in, for a load to know of."""
    moments = _moments(index)
    state: dict[str, StateValue] = {}
    for path, parameter in parameters.items():
        if parameter.layout is None or rank in parameter.layout.mesh.ranks:
            continue
        for _, name in _saved_moments(moments, index, path):
            entry = index.tensors[name]
            nothing = torch.empty(0, dtype=dtype_of(entry.dtype))
            layout = parameter.layout.mesh(*(None for _ in entry.shape))
            state[name] = Local(nothing, layout, tuple(entry.shape))
    return state


def _moments(index: Index) -> dict[str, list[tuple[str, str]]]:
    """By the name of a parameter, (moment, name of it) of what a checkpoint has."""
    moments: dict[str, list[tuple[str, str]]] = {}
    for name in index.tensors:
        room, _, rest = name.partition("/")
        if room == "optimizer":
            moment, _, path = rest.partition("/")
            moments.setdefault(MODEL + path, []).append((moment, name))
    return moments


def _saved_moments(
    moments: Mapping[str, list[tuple[str, str]]], index: Index, path: str
) -> list[tuple[str, str]]:
    return moments.get(index.aliases.get(MODEL + path, MODEL + path), [])


def restore_settings(
    parameters: Mapping[str, StateValue], optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> None:
    """Put back the settings of each parameter group and the counters that are not tensors."""
    saved = {path: group for group in facts["groups"] for path in group["params"]}
    paths = _paths(parameters)
    for group in optimizer.param_groups:
        for parameter in group["params"][:1]:  # one parameter tells the group
            for key, value in saved.get(_path_of(paths, parameter), {}).items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                elif key != "params":
                    group[key] = tuple(value) if isinstance(value, list) else value
    for name, value in facts["numbers"].items():
        _, moment, path = name.split("/", 2)
        optimizer.state[_tensor(parameters[path])][moment] = value


def random_state(rank: int) -> dict[str, StateValue]:
    """The states of this process's random generators: torch, CUDA where used, Python, numpy."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert (version, kind) == (3, "MT19937")
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        # The second number of a pair that is drawn at once, if it waits: dropped, the next would differ.
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return {f"random/{rank}/{name}": Local.of_rank(t, rank) for name, t in tensors.items()}


def empty_random_state(index: Index, rank: int) -> dict[str, torch.Tensor]:
    """Tensors by generator for the state that `rank` of this run takes over; fill and restore."""
    prefix = f"random/{rank % index.world}/"
    return {
        name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        for name, entry in index.tensors.items()
        if name.startswith(prefix)
    }


def restore_random_state(tensors: Mapping[str, torch.Tensor]) -> None:
    """Set this process's generators from a loaded `random_state`."""
    found = {name.rpartition("/")[2]: tensor for name, tensor in tensors.items()}
    if "torch" in found:
        torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    if "python" in found:
        gauss = float(found["python_gauss"])
        words = tuple(found["python"].tolist())
        random.setstate((3, words, None if math.isnan(gauss) else gauss))
    if "numpy" in found:
        *keys, position, has_gauss = found["numpy"].tolist()
        cached = float(found["numpy_gauss"])
        np.random.set_state(("MT19937", np.asarray(keys, np.uint32), position, has_gauss, cached))


def _tensor(value: StateValue) -> torch.Tensor:
    return value.tensor if isinstance(value, Local) else value


def _paths(parameters: Mapping[str, StateValue]) -> dict[int, str]:
    return {id(_tensor(value)): path for path, value in parameters.items()}


def _path_of(paths: Mapping[int, str], parameter: torch.Tensor) -> str:
    path = paths.get(id(parameter))
    if path is None:
        given = f"a parameter of shape {list(parameter.shape)}"
        raise CheckpointError("optimizer", given, "parameters of the module it is saved with")
    return path


def _cut_like(parameter: StateValue, moment: str, value: torch.Tensor) -> StateValue:
    """A moment of a local parameter as a piece of the whole moment; others are whole on its ranks."""
    if not isinstance(parameter, Local) or parameter.layout is None:
        return value
    if value.shape == parameter.tensor.shape and moment != "step":
        return Local(value, parameter.layout, parameter.shape)
    return Local(value, parameter.layout.mesh(*(None for _ in value.shape)), tuple(value.shape))


def _empty_moment(
    moment: str, entry: TensorEntry, parameter: StateValue, on_device: bool
) -> torch.Tensor:
    tensor, dtype = _tensor(parameter), dtype_of(entry.dtype)
    if moment != "step" and entry.shape == tuple(parameter.shape):
        return torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    # torch.optim keeps its step counts on the host, but for its fused and capturable forms
    device = tensor.device if on_device or moment != "step" else torch.device("cpu")
    return torch.zeros(entry.shape, dtype=dtype, device=device)
