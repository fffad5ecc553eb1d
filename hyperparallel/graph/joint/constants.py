"""Tensors that nobody owns: made from Python values in the forward, or kept outside parameters and buffers.

The tracer leaves them as attributes of its graph. Here each becomes the call of a function without
arguments, as `torch.arange` is one, so that all that follows takes it for an op whose result never
changes: decided like any other, run once, cut by every rank for itself. Its value is that of the time of
capture; a module that changes such a tensor between steps needs a buffer for it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, fx

from hyperparallel.errors import CaptureError

_LIFTED = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


class Constant:
    """A function that returns a copy of one tensor; equal tensors make equal functions.

    >>> Constant(torch.ones(2)) == Constant(torch.ones(2)), Constant(torch.ones(2))()
    (True, tensor([1., 1.]))
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.__name__ = f"constant_{_digest(self.tensor)}"

    def __call__(self) -> Tensor:
        return self.tensor.clone()

    def __str__(self) -> str:
        return self.__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.__name__ == other.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


def _digest(tensor: Tensor) -> str:
    # Not the device's number: every rank names an op after this, and all must find the same names.
    kind = repr((tuple(tensor.shape), tensor.dtype, tensor.device.type)).encode()
    if tensor.is_meta:
        return hashlib.sha256(kind).hexdigest()[:12]
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    content = flat.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(kind + content).hexdigest()[:12]


def lift_constants(graph_module: fx.GraphModule) -> int:
    """Replace attributes by calls of `Constant`, in place; returns how many there were."""
    graph = graph_module.graph
    found = list(graph.find_nodes(op="get_attr"))
    made: dict[str, fx.Node] = {}
    for node in found:
        name = str(node.target)
        tensor = getattr(graph_module, name, None)
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise CaptureError(name, f"a {kind} in the graph", "a forward without higher-order ops")
        # One call for an attribute that is read several times: it is one tensor.
        if name not in made:
            with graph.inserting_before(node):
                made[name] = graph.call_function(Constant(tensor), ())
            made[name].meta = {k: v for k, v in node.meta.items() if k != "partitioner_tag"}
        _replace(graph, node, made[name])
    return len(found)


def _replace(graph: fx.Graph, node: fx.Node, constant: fx.Node) -> None:
    for user in list(node.users):
        if user.target in _LIFTED:
            user.replace_all_uses_with(constant)
            graph.erase_node(user)
    node.replace_all_uses_with(constant)
    graph.erase_node(node)
