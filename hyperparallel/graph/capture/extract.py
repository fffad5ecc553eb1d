"""FX graph -> `Workload`: the torch-free, read-only picture of a captured program.

A tuple-valued op and its `getitem`s become one `Op` with several outputs. Each value carries the name of
the FX node that makes it, so that decisions about the workload can be looked up while the graph is
rewritten. Dtypes, devices and memory formats become text; of a device only its type, which is the same on
all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hyperparallel.workload import Op, Ref, Value, Workload

if TYPE_CHECKING:
    from hyperparallel.graph.capture.capture import Captured


def extract(captured: Captured) -> Workload:
    """The workload of a captured joint graph; value names are FX node names."""
    graph = captured.graph_module.graph
    values: dict[str, Value] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            values[node.name] = _value(node.name, value)
    blocks = captured.blocks
    ops = tuple(
        _op(node, blocks)
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    )
    return Workload(
        ops=ops,
        values=values,
        params=captured.params,
        buffers=captured.buffers,
        inputs=captured.inputs,
        outputs=captured.outputs,
        grads=captured.grads,
        tangents=captured.tangents,
        input_grads=captured.input_grads,
        mutations=captured.mutations,
        param_aliases=captured.param_aliases,
    )


def _value(name: str, tensor: torch.Tensor) -> Value:
    shape = tuple(int(size) for size in tensor.shape)
    return Value(name, shape, str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def _op(node: fx.Node, blocks: Mapping[str, tuple[str, int, str]]) -> Op:
    inputs: list[str] = []
    args = _plain(node.args, inputs)
    kwargs = {key: _plain(value, inputs) for key, value in node.kwargs.items()}
    return Op(
        name=node.name,
        target=str(node.target),
        args=args,
        kwargs=kwargs,
        inputs=tuple(inputs),
        outputs=_outputs(node),
        backward=node.meta.get("partitioner_tag") == "is_backward",
        module=module_of(node),
        block=blocks.get(node.name),
        layouts=getattr(node.target, "layouts", None),
    )


def _outputs(node: fx.Node) -> tuple[str | None, ...]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (node.name,)
    # A result that no `getitem` takes is not used.
    results: list[str | None] = [None] * (len(value) if isinstance(value, (tuple, list)) else 0)
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.meta.get("val"), torch.Tensor):
            results[user.args[1]] = user.name  # type: ignore[index]
    return tuple(results)


def _plain(value: Any, inputs: list[str]) -> Any:
    if isinstance(value, fx.Node):
        inputs.append(value.name)
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, inputs) for item in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return value.type  # ranks have cuda:0, cuda:1, ... and must find that they captured the same
    if value is None or isinstance(value, (bool, int, float, str, complex)):
        return value
    return str(value)


def module_of(node: fx.Node) -> str:
    """The qualified name of the module that a node came from ("" for the model itself)."""
    return str((node.meta.get("custom") or {}).get("module", ""))
