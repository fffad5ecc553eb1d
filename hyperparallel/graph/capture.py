"""From a module and an example batch to one joint forward and backward graph of ATen ops.

`capture` runs the module's own forward once on tensors that have shapes but no memory, differentiates
it, and names every parameter, buffer, input, output, gradient and buffer update of the resulting graph.
The user's module is not touched. Placeholders stand in the order parameters, buffers, inputs, tangents;
the graph returns outputs, buffer updates, parameter gradients, input gradients, in that order.

What is baked in: shapes, Python values, devices, training mode. What is left out: objects in the result
that hold no tensors torch knows how to find become None; in-place changes to the batch are not played
back; a parameter that the loss does not depend on has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperparallel.errors import CaptureError
from hyperparallel.graph import trace as tracing
from hyperparallel.graph.batch import CallTree, Tree, call_tree
from hyperparallel.graph.naming import name_graph
from hyperparallel.graph.skeleton import batch_device, fake_tensor, named_tensors, skeleton


@dataclass
class Captured:
    """A joint graph and the meaning of its placeholders and results.

    `params`, `buffers`, `inputs`, `tangents` map a name to a placeholder. `results` says what the graph
    returns, in order, as (role, name) with role "output", "mutation", "grad" or "input_grad"; the
    properties of the same names look the nodes up, so they stay right when a pass rewrites the graph.
    Backward nodes have `meta["partitioner_tag"] == "is_backward"`; nodes of a repeated block have
    `meta["block"] == (kind, index, local name)`.
    """

    graph_module: fx.GraphModule
    params: dict[str, str]
    param_aliases: dict[str, str]
    buffers: dict[str, str]
    inputs: dict[str, str]
    tangents: dict[str, str]
    results: list[tuple[str, str]]
    in_spec: CallTree
    out_spec: Tree
    buffer_aliases: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def _role(self, role: str) -> dict[str, str]:
        returned = output_node(self.graph).args[0]
        assert isinstance(returned, (tuple, list))
        pairs = zip(self.results, returned, strict=True)
        return {name: node.name for (r, name), node in pairs if r == role and isinstance(node, fx.Node)}

    @property
    def outputs(self) -> dict[str, str]:
        return self._role("output")

    @property
    def mutations(self) -> dict[str, str]:
        return self._role("mutation")

    @property
    def grads(self) -> dict[str, str]:
        return self._role("grad")

    @property
    def input_grads(self) -> dict[str, str]:
        return self._role("input_grad")

    @property
    def blocks(self) -> dict[str, tuple[str, int, str]]:
        return {n.name: n.meta["block"] for n in self.graph.nodes if "block" in n.meta}

    def flatten_inputs(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[torch.Tensor]:
        """The tensors of a batch in the order of `inputs`."""
        return self.in_spec.flatten(args, kwargs or {})

    def rebuild_outputs(self, values: Sequence[Any]) -> Any:
        """The object the user's forward returns, around `values` in the order of `outputs`."""
        return self.out_spec.rebuild(iter(values))


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that returns the graph's results."""
    return next(iter(reversed(graph.nodes)))


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    grad_outputs: Sequence[str] | None = None,
    strict: bool | None = None,
) -> Captured:
    """Capture `module(*args, **kwargs)` as one joint graph.

    With `train`, a module in evaluation mode is captured in training mode (a module in training mode
    is taken as it is, frozen submodules included) with its backward; without, in evaluation mode and
    forward only. `grad_outputs` names the outputs that gradients come from (if None: "loss" where there
    is one, else all differentiable ones). `strict` forces one tracing route. Raises
    `CaptureError` naming the line that stopped it.

    >>> found = capture(nn.Linear(2, 3), (torch.zeros(4, 2),))
    >>> found.params, list(found.inputs), list(found.outputs), list(found.grads)
    ({'weight': 'param_weight', 'bias': 'param_bias'}, ['input'], ['output'], ['weight', 'bias'])
    """
    call, leaves = call_tree(module, args, kwargs or {})
    device = batch_device(leaves)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = skeleton(module, mode, device)
    if not train:
        twin.eval()
    elif not module.training:
        twin.train()
    fakes = [fake_tensor(mode, leaf, device) for leaf in leaves]
    found = tracing.trace(
        twin,
        call,
        fakes,
        mode,
        train=train,
        wants_grad=lambda paths: _gradient_roots(paths) if grad_outputs is None else grad_outputs,
        strict=strict,
    )
    params, buffers = (_aliases(tensors) for tensors in named_tensors(module))
    names = name_graph(found, call)
    return Captured(
        graph_module=found.graph_module,
        params=names.params,
        param_aliases=params,
        buffers=names.buffers,
        inputs=names.inputs,
        tangents=names.tangents,
        results=names.results,
        in_spec=call,
        out_spec=found.out_tree,
        buffer_aliases=buffers,
    )


def _gradient_roots(paths: Sequence[str]) -> Sequence[str]:
    return ("loss",) if "loss" in paths else paths


def keep_outputs(captured: Captured, wanted: Sequence[str]) -> None:
    """Drop the other outputs from a captured graph, in place; raises `CaptureError` for unknown ones."""
    for path in wanted:
        if path not in captured.outputs:
            raise CaptureError("output", path, f"one of {', '.join(captured.outputs)}")
    keep = [role != "output" or name in wanted for role, name in captured.results]
    last = output_node(captured.graph)
    returned = zip(last.args[0], keep, strict=True)  # type: ignore[arg-type]
    last.args = ([value for value, kept in returned if kept],)
    captured.results = [r for r, kept in zip(captured.results, keep, strict=True) if kept]
    captured.graph.eliminate_dead_code()


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first[id(x)] for name, x in tensors.items() if first.setdefault(id(x), name) != name
    }


def nodes_of(captured: Captured) -> Iterator[fx.Node]:
    """The computing nodes of a captured graph, in order."""
    return (n for n in captured.graph.nodes if n.op not in ("placeholder", "output"))
