"""From a module and an example batch to one joint forward and backward graph of ATen ops.

`capture` runs the module's own forward once on tensors that have shapes but no memory,
differentiates it, and names every parameter, buffer, input, output, gradient and buffer update of
the resulting graph. The user's module is not touched. Placeholders stand in the order parameters,
buffers, inputs, tangents; the graph returns outputs, buffer updates, parameter gradients, input
gradients, in that order.

What is baked in: shapes, Python values, devices, training mode. What is left out: objects in the
result that hold no tensors torch knows how to find become None; in-place changes to the batch are
not played back; a buffer that the forward binds anew with another shape keeps its value; a parameter that
the loss does not depend on has no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule  # checked on torch 2.13

from hyperparallel.errors import CaptureError
from hyperparallel.graph.capture.batch_tree import CallTree, Tree, call_tree
from hyperparallel.graph.capture.blocks import Stack, find_stacks, mark_blocks, why_interleaved
from hyperparallel.graph.capture.kept_blocks import Reduction, Watch, reduce_stack
from hyperparallel.graph.capture.naming import Names, name_graph
from hyperparallel.graph.capture.precision import check_compute, computing
from hyperparallel.graph.capture.repeat_blocks import NotUniform, Result, check_order, stamp
from hyperparallel.graph.capture.skeleton import batch_device, fake_tensor, named_tensors, skeleton
from hyperparallel.graph.capture.trace import Trace, trace
from hyperparallel.graph.joint.constants import lift_constants
from hyperparallel.graph.joint.mask import fold_masks
from hyperparallel.graph.joint.promote import promote
from hyperparallel.graph.joint.tidy import tidy_graph
from hyperparallel.graph.region.tracing import Tracing, lift_regions, tracing
from hyperparallel.layout import Mesh


@dataclass
class Captured:
    """A joint graph and the meaning of its placeholders and results.

    `params`, `buffers`, `inputs`, `tangents` map a name to a placeholder. `results` says what the
    graph returns, in order, as (role, name) with role "output", "mutation", "grad" or "input_grad";
    the properties of the same names look the nodes up, so they stay right when a pass rewrites the
    graph. Backward nodes have `meta["partitioner_tag"] == "is_backward"`; nodes of a repeated block
    have `meta["block"] == (kind, index, local name)`.

    >>> captured = capture(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    >>> sorted(captured.params), list(captured.inputs), list(captured.outputs)
    (['bias', 'weight'], ['input'], ['output'])
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
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    as_is: bool = False,
    grad_outputs: Sequence[str] | None = None,
    strict: bool | None = None,
    shorten: bool = True,
    compute: str | None = None,
    mesh: Mesh | None = None,
    device: torch.device | None = None,
) -> Captured:
    """Capture `module(*args, **kwargs)` as one joint graph, tidied and with constant masks folded.

    With `train`, a module in evaluation mode is captured in training mode (a module in training
    mode is taken as it is, frozen submodules included) with its backward; without, in evaluation
    mode and forward only. With `as_is`, modes are as the module has them. `grad_outputs` names the
    outputs that gradients come from (if None: "loss" where there is one, else all differentiable
    ones). `strict` forces one tracing route. With `shorten`, a deep stack of equal blocks is traced
    with four of them and the rest copied, if nothing speaks against it. compute: mixed precision, see
    `precision.py`. mesh: what the layouts of the module's regions (`region/`) stand on. device: where
    the program will run, by default where the batch is: a graph names devices and has ops that only
    one kind of device computes. Raises `CaptureError` naming the line that stopped it.

    >>> found = capture(nn.Linear(2, 3), (torch.zeros(4, 2),))
    >>> found.params, list(found.inputs), list(found.outputs), list(found.grads)
    ({'weight': 'param_weight', 'bias': 'param_bias'}, ['input'], ['output'], ['weight', 'bias'])
    """
    check_compute(compute, named_tensors(module)[0])
    call, leaves = call_tree(module, args, kwargs or {})
    stacks = find_stacks(module)
    task = _Task(module, call, leaves, train, as_is, grad_outputs, stacks, compute, mesh, device)
    reductions = [r for r in map(reduce_stack, task.stacks) if r is not None]
    if shorten and reductions and not strict:
        # What stops the short way is no error yet: the whole model is traced then, and tells.
        with contextlib.suppress(NotUniform, CaptureError):
            return task.run(False, reductions)
    return task.run(strict, [])


@dataclass(frozen=True)
class _Task:
    """One call of `capture`: what stays the same whichever way the module is traced."""

    module: nn.Module
    call: CallTree
    leaves: list[torch.Tensor]
    train: bool
    as_is: bool
    grad_outputs: Sequence[str] | None
    stacks: list[Stack]
    compute: str | None = None
    mesh: Mesh | None = None
    device: torch.device | None = None

    def run(self, strict: bool | None, reductions: list[Reduction]) -> Captured:
        watches = [Watch(reduction) for reduction in reductions]
        with tracing(self.mesh, capture, lambda device: computing(self.compute, device)) as regions:
            found = self._trace(strict, watches, regions)
        names = name_graph(found, self.call)
        graph = found.graph_module.graph
        # A number kept by one block would be copied into all others.
        if lift_constants(found.graph_module) and reductions:
            raise NotUniform("tensors that are no parameters may differ from block to block")
        lift_regions(graph, regions.regions)
        # Before blocks are marked: a written-out cast is a node of its block like any other.
        promote(graph)
        mark_blocks(graph, self.stacks)
        for watch in watches:
            doubt = watch.doubt or why_interleaved(graph, watch.reduction.stack)
            if doubt:
                raise NotUniform(doubt)
        tidy_graph(graph)
        fold_masks(graph)
        params, buffers = named_tensors(self.module)
        if reductions:
            self._stamp(graph, names, reductions, [*params, *buffers])
        return Captured(
            graph_module=_LazyGraphModule.from_graphmodule(found.graph_module),
            params=names.params,
            param_aliases=_aliases(params),
            buffers=names.buffers,
            inputs=names.inputs,
            tangents=names.tangents,
            results=names.results,
            in_spec=self.call,
            out_spec=found.out_tree,
            buffer_aliases=_aliases(buffers),
        )

    def _trace(self, strict: bool | None, watches: list[Watch], regions: Tracing) -> Trace:
        device, all_moved = self.device or batch_device(self.leaves), self.device is not None
        # Tensors that a module holds outside parameters and buffers are real.
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Stand-ins take the place of dropped blocks when the module is copied.
        memo = {key: twin for watch in watches for key, twin in watch.stand_ins().items()}
        twin = skeleton(self.module, mode, device, all_moved, memo)
        # `train()` on a module in training mode would wake submodules that were put in evaluation mode.
        if not self.as_is and not (self.train and self.module.training):
            twin.train(self.train)
        for watch in watches:
            watch.attach(twin.get_submodule(watch.reduction.stack.name))
        fakes = [fake_tensor(mode, leaf, device, all_moved) for leaf in self.leaves]
        wanted = self.grad_outputs
        return trace(
            twin,
            self.call,
            fakes,
            mode,
            train=self.train,
            wants_grad=lambda paths: gradient_roots(paths) if wanted is None else wanted,
            strict=strict,
            running=lambda: regions.passing(device.type),
        )

    def _stamp(self, graph: fx.Graph, names: Names, reductions: list[Reduction], order: list[str]) -> None:
        results = returned(graph, names.results)
        for reduction in reductions:
            results = stamp(graph, reduction, results, order)
        check_order(graph)
        roles = {role: place for place, role in enumerate(("output", "mutation", "grad"))}
        # New units' results came last; callers count on the order of the modules.
        rank = {name: place for place, name in enumerate(order)}
        results.sort(key=lambda r: (roles.get(r.role, 3), rank.get(r.name, 0)))
        output_node(graph).args = (tuple(r.node for r in results),)
        names.results = [(r.role, r.name) for r in results]
        for node in graph.find_nodes(op="placeholder"):
            role, name = node.meta["role"]
            names.of(role)[name] = node.name
        for role in ("param", "buffer"):
            held = names.of(role)
            for name in sorted(held, key=rank.__getitem__):
                held[name] = held.pop(name)


def returned(graph: fx.Graph, roles: Sequence[tuple[str, str]]) -> list[Result]:
    """What a graph returns, with its meaning."""
    values = output_node(graph).args[0]
    assert isinstance(values, (tuple, list))
    return [Result(role, name, x) for (role, name), x in zip(roles, values, strict=True)]


def gradient_roots(paths: Sequence[str]) -> Sequence[str]:
    """The results that gradients come from: "loss" where there is one, else all."""
    return ("loss",) if "loss" in paths else paths


def check_outputs(captured: Captured, wanted: Sequence[str]) -> None:
    """`CaptureError` for the path of a result that there is not."""
    for path in wanted:
        if path not in captured.outputs:
            raise CaptureError("output", path, f"one of {', '.join(captured.outputs)}")


def keep_outputs(captured: Captured, wanted: Sequence[str]) -> None:
    """Drop other outputs from a captured graph, in place; `CaptureError` for unknown ones."""
    check_outputs(captured, wanted)
    found = [r for r in returned(captured.graph, captured.results) if r.role != "output" or r.name in wanted]
    output_node(captured.graph).args = (tuple(r.node for r in found),)
    captured.results = [(r.role, r.name) for r in found]
    captured.graph.eliminate_dead_code()


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first[id(x)] for name, x in tensors.items() if first.setdefault(id(x), name) != name}
