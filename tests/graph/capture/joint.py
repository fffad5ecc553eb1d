"""Run a captured joint graph and the eager module on the same values, to compare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyperparallel.graph.capture.batch_tree import flatten
from hyperparallel.graph.capture.capture import Captured
from hyperparallel.graph.capture.trace import output_paths

Found = dict[str, dict[str, torch.Tensor]]


def tangents_of(captured: Captured) -> list[torch.Tensor]:
    """Incoming gradients: one for a scalar, random numbers for anything else."""
    generator = torch.Generator().manual_seed(5)
    by_name = {n.name: n.meta["val"] for n in captured.graph.find_nodes(op="placeholder")}
    vals = [by_name[name] for name in captured.tangents.values()]
    return [
        torch.ones((), dtype=v.dtype)
        if v.dim() == 0
        else torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype)
        for v in vals
    ]


def run_graph(
    captured: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Found, Any]:
    """What the graph returns by role and name, and the user's output object."""
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    values = [params[name].detach() for name in captured.params]
    values += [buffers[name].clone() for name in captured.buffers]
    values += [x.detach() for x in captured.flatten_inputs(args, kwargs)]
    torch.manual_seed(9)
    with torch.no_grad():
        returned = captured.graph_module(*values, *tangents_of(captured))
    found: Found = {"output": {}, "mutation": {}, "grad": {}, "input_grad": {}}
    for (role, name), value in zip(captured.results, returned, strict=True):
        found[role][name] = value
    return found, captured.rebuild_outputs(list(found["output"].values()))


def run_eager(captured: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """The same from the module itself and autograd, with the same incoming gradients."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(9)
    tree, leaves = flatten(module(*args, **kwargs))
    outputs = dict(zip(output_paths(tree), leaves, strict=True))
    if captured.tangents:
        roots = [outputs[path] for path in captured.tangents]
        torch.autograd.backward(roots, tangents_of(captured))
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {
        "output": {path: x.detach() for path, x in outputs.items() if path in captured.outputs},
        "mutation": {name: dict(module.named_buffers())[name] for name in captured.mutations},
        "grad": {name: g for name, g in grads.items() if name in captured.params},
        "input_grad": {},
    }


def assert_equal_to_eager(
    captured: Captured,
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> Any:
    """Outputs, buffer updates and all gradients agree; returns the rebuilt output object."""
    found, result = run_graph(captured, module, args, kwargs or {})
    wanted = run_eager(captured, module, args, kwargs or {})
    for role, values in wanted.items():
        assert list(found[role]) == list(values) or set(found[role]) == set(values), role
        for name, value in values.items():
            torch.testing.assert_close(
                found[role][name], value, rtol=tolerance, atol=tolerance, msg=f"{role} {name}"
            )
    return result
