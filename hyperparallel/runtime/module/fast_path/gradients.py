"""Gradients of DTensor parameters, handed to autograd or put where autograd would put them.

Autograd's own last step for a leaf costs a DTensor dispatch each (it detaches the gradient, or adds it to
the one there), more than a small op. So the backward of a whole program does that step itself where nobody
could tell: the engine will accumulate into this leaf, no hook wants to see the gradient, the device has no
streams to wait for. Everything else goes through the engine: `torch.autograd.grad`, `create_graph`, hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_new = torch.Tensor._dtensor__new__


def _references(edge: tuple[Any, int]) -> int:
    return sys.getrefcount(edge[0])


def _unheld() -> int:
    leaf = torch.zeros(1, requires_grad=True)
    view = leaf.view(1)
    return _references(view.grad_fn.next_functions[0])  # type: ignore[union-attr]


_UNHELD = _unheld()
"""References to a leaf's node when nobody holds it, as who registers hooks on it does."""


def as_dtensor(local: Tensor, spec: Any) -> DTensor:
    """A local tensor under another DTensor's spec: the constructor that `from_local` ends in (torch 2.13)."""
    made: DTensor = _new(DTensor, local, spec, requires_grad=False)
    return made


def hand_over(
    parameters: Sequence[DTensor], grads: Sequence[Tensor | None], edges: Sequence[tuple[Any, int]]
) -> list[DTensor | None]:
    """What a backward returns for its parameters; None also where the gradient is in its place already.

    grads: local pieces, this function's to keep. edges: the node and input that each would go to.
    """
    device = next((grad.device.type for grad in grads if grad is not None), "")
    # On a device the engine also orders streams: the backward's and the one that reads the gradient.
    by_engine = torch.is_grad_enabled() or device != "cpu"  # create_graph, or streams to wait for
    returned: list[DTensor | None] = []
    # Edges go on with those of the batch's tensors, which have none here.
    for parameter, grad, edge in zip(parameters, grads, edges, strict=False):
        if grad is None:
            returned.append(None)
        elif (
            by_engine
            # Hooks on the node itself show nowhere else than in who holds it.
            or _references(edge) > _UNHELD
            or not _is_plain(parameter, grad, edge[0])
            or not _accumulate(parameter, grad)
        ):
            returned.append(as_dtensor(grad, parameter._spec))
        else:
            returned.append(None)
    return returned


def _is_plain(parameter: DTensor, grad: Tensor, node: Any) -> bool:
    """Whether accumulating `grad` is all that the engine would do with it."""
    if type(node) is not _AccumulateGrad or node.variable is not parameter:
        return False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    if not parameter.requires_grad or grad.dtype != parameter._local_tensor.dtype:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad: the gradient is the caller's
        return False


def _accumulate(parameter: DTensor, grad: Tensor) -> bool:
    """Do as the engine would; False where the gradient there is laid out otherwise."""
    there = parameter.grad
    if there is None:
        parameter.grad = as_dtensor(grad, parameter._spec)
        return True
    # A gradient with a graph of its own (create_graph) must not be changed in place.
    if not isinstance(there, DTensor) or there.requires_grad or there.dtype != grad.dtype:
        return False
    if there._spec is not parameter._spec and there._spec != parameter._spec:
        return False
    there._local_tensor.add_(grad)
    # The DTensor has a version of its own, which adding to its local tensor does not count.
    torch.autograd.graph.increment_version(there)
    return True
