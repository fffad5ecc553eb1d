"""Sharded and single-device gradients in 16 bits, and how far they are from float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyperparallel.graph.build import Built
from hyperparallel.graph.capture.precision import computing
from hyperparallel.runtime.exec.virtual import Lockstep
from hyperparallel.runtime.module.certify import _placeholders, _result_names, assemble


def dense_gradients(model: nn.Module, batch: Mapping[str, Tensor], compute: str | None) -> dict[str, Tensor]:
    """Gradients of the loss by the plain module, in float64."""
    with computing(compute, "cpu"):
        loss = model(**batch)["loss"]
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return {n: g.double() for n, g in zip(names, grads, strict=True) if g is not None}


def true_gradients(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by the module in float64."""
    wide = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    return dense_gradients(copy.deepcopy(model).double(), wide, None)


def sharded_gradients(built: Built, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by all ranks' programs of the loss alone, in float64."""
    mesh = built.decisions.mesh
    programs = [built.rank_program(rank) for rank in mesh.ranks]
    held: Any = dict(model.named_parameters()), dict(model.named_buffers())
    leaves = built.captured.flatten_inputs((), batch)
    (path,) = built.captured.tangents
    one = {path: torch.ones(())}
    rows = [_placeholders(program, built, *held, leaves, one) for program in programs]
    with torch.no_grad():
        results = Lockstep(programs, lambda rank, axes: mesh.group(rank, axes)).run(rows)
    found = {}
    for i, (name, spec) in enumerate(_result_names(programs[0])):
        if name.startswith("grad of "):
            whole, agree = assemble([row[i] for row in results], spec, list(mesh.ranks))
            assert agree, name
            found[name.removeprefix("grad of ")] = whole.double()
    return found


def error(found: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> float:
    """The relative error of all gradients together, in the root of mean squares."""
    wrong = sum(float((found[name] - x).square().sum()) for name, x in true.items())
    return float((wrong / sum(float(x.square().sum()) for x in true.values())) ** 0.5)
