"""Give a traced joint graph its readable names: what each placeholder is and what each result
means.

AOTAutograd describes its inputs and outputs with descriptor objects; nothing else in the package
looks at them. Copies that were made only so that outputs do not alias are removed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (  # checked on torch 2.13
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.fx.graph import CodeGen

from hyperparallel.errors import CaptureError
from hyperparallel.graph.capture.batch_tree import CallTree
from hyperparallel.graph.capture.trace import Trace, output_paths


@dataclass
class Names:
    """Placeholder node names by meaning, and (role, name) of each returned value."""

    params: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    tangents: dict[str, str] = field(default_factory=dict)
    results: list[tuple[str, str]] = field(default_factory=list)

    def of(self, role: str) -> dict[str, str]:
        """The names of one role: "param", "buffer", "input" or "tangent"."""
        roles = {"param": self.params, "buffer": self.buffers, "input": self.inputs}
        return roles.get(role, self.tangents)


def identifier(role: str, name: str) -> str:
    """A node name for a parameter, buffer, input or tangent.

    >>> identifier("param", "layers.0.weight")
    'param_layers_0_weight'
    """
    return re.sub(r"\W", "_", f"{role}_{name}")


def name_graph(trace: Trace, call: CallTree) -> Names:
    """Rename the placeholders, order the results, say what each is; edits the graph in place."""
    graph = trace.graph_module.graph
    inputs, outputs = call.paths(), output_paths(trace.out_tree)
    names = Names()

    def role_of(desc: object) -> tuple[str, str]:
        if isinstance(desc, ParamAOTInput):
            # `_Flat` holds them as p0, p1, ...: the number is the place in `param_names`.
            return "param", trace.param_names[int(desc.target[1:])]
        if isinstance(desc, BufferAOTInput):
            return "buffer", trace.buffer_names[int(desc.target[1:])]
        if isinstance(desc, PlainAOTInput):
            return "input", inputs[desc.idx]
        if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
            return "tangent", outputs[desc.output.idx]
        raise CaptureError("module", repr(desc), "plain tensors as inputs and outputs")

    for node in graph.find_nodes(op="placeholder"):
        role, name = role_of(node.meta["desc"])
        node._rename(identifier(role, name))
        node.target = node.name
        node.meta["role"] = (role, name)
        names.of(role)[name] = node.name
    _order_results(trace, names, role_of, outputs)
    graph.set_codegen(CodeGen())  # flat arguments instead of (primals, tangents)
    graph.eliminate_dead_code()
    return names


def _order_results(
    trace: Trace,
    names: Names,
    role_of: Callable[[object], tuple[str, str]],
    outputs: list[str],
) -> None:
    node = next(iter(reversed(trace.graph_module.graph.nodes)))
    found: dict[str, list[tuple[str, fx.Node]]] = {
        role: [] for role in ("output", "mutation", "grad", "input_grad")
    }
    for desc, value in zip(node.meta["desc"], node.args[0], strict=True):
        if value is None:
            continue
        if isinstance(desc, PlainAOTOutput):
            found["output"].append((outputs[desc.idx], _without_copy(value)))
        elif isinstance(desc, InputMutationAOTOutput):
            role, name = role_of(desc.mutated_input)
            # In-place changes to the batch are not played back.
            if role != "input":
                found["mutation"].append((name, value))
        elif isinstance(desc, GradAOTOutput):
            role, name = role_of(desc.grad_of)
            found["input_grad" if role == "input" else "grad"].append((name, value))
        else:
            raise CaptureError("module", repr(desc), "plain tensors as outputs")
    names.results = [(role, name) for role, pairs in found.items() for name, _ in pairs]
    node.args = (tuple(value for pairs in found.values() for _, value in pairs),)
    # Its descriptors are in the old order.
    node.meta = {}


def _without_copy(value: fx.Node) -> fx.Node:
    if value.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        source = value.args[0]
        assert isinstance(source, fx.Node)
        return _without_copy(source)
    return value
