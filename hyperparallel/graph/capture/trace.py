"""Run a fake module once and record its joint forward and backward as ATen ops.

Two routes, tried in order. The direct one lets AOTAutograd trace the module's own Python (about
half the time of the other, and it works with any Python that does not read tensor values). The
strict one has Dynamo read the bytecode first, which copes with a few things that direct tracing
cannot (calls that refuse tensor subclasses, for example). If both stop, the error tells the user's
line (`capture_errors.py`).

Every forward node's `meta["custom"]["module"]` is the qualified name of the module that ran it;
AOTAutograd copies it to the backward nodes that differentiate it.

Private torch names used here and in `skeleton.py` were checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

from hyperparallel.errors import UserError
from hyperparallel.graph.capture.batch_tree import CallTree, Tree, flatten
from hyperparallel.graph.capture.capture_errors import capture_error
from hyperparallel.graph.capture.skeleton import named_tensors

WantsGrad = Callable[[Sequence[str]], Sequence[str]]
"""From the paths of all results to those that gradients come from."""
Running = Callable[[], AbstractContextManager[Any]]
"""Makes what surrounds the module's forward: mixed precision, or nothing."""


@dataclass(frozen=True)
class Trace:
    """A joint graph as AOTAutograd made it, its parameters and buffers in order, and its result."""

    graph_module: fx.GraphModule
    param_names: list[str]
    buffer_names: list[str]
    out_tree: Tree


class _Flat(nn.Module):
    """Takes the batch's tensors, returns the result's.

    Parameters and buffers are held once each, however many names they have. A result is copied, so
    that no result aliases another or an input. A buffer that the forward binds anew is written
    back. The module alone runs in the context that `running` makes.
    """

    def __init__(self, module: nn.Module, call: CallTree, wants_grad: WantsGrad, running: Running) -> None:
        super().__init__()
        self._call, self._wants_grad, self._running = call, wants_grad, running
        self._module = [module]  # in a list, so that it is no submodule
        self.out_tree: Tree | None = None
        params, buffers = named_tensors(module)
        self._slots: dict[str, str] = {}
        self.param_names = self._hold(params, "p")
        self.buffer_names = self._hold(buffers, "b")

    def _hold(self, tensors: dict[str, torch.Tensor], letter: str) -> list[str]:
        slot_of: dict[int, str] = {}
        names: list[str] = []
        for name, x in tensors.items():
            # A tied tensor has one slot: in two it would be two parameters, each with a part of the gradient.
            if id(x) not in slot_of:
                slot_of[id(x)] = slot = f"{letter}{len(names)}"
                names.append(name)
                if isinstance(x, nn.Parameter):
                    self.register_parameter(slot, x)
                else:
                    self.register_buffer(slot, x)
            self._slots[name] = slot_of[id(x)]
        return names

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        module = self._module[0]
        tensors = {name: getattr(self, slot) for name, slot in self._slots.items()}
        with _reparametrize_module(module, tensors):
            with self._running():
                self.out_tree, found = flatten(self._call.call(module, leaves))
            for name in self.buffer_names:
                bound, held = module.get_buffer(name), tensors[name]
                # Written back as a copy, which AOTAutograd reports as a mutation of the buffer.
                if bound is not held and bound.shape == held.shape:
                    held.copy_(bound)
        paths = output_paths(self.out_tree)
        wanted = self._wants_grad(paths)
        return tuple(
            # Detached: a result that is not differentiated would get a tangent all the same.
            x.clone() if path in wanted else x.detach().clone() for path, x in zip(paths, found, strict=True)
        )


def output_paths(tree: Tree) -> list[str]:
    """Paths of the result's tensors; a result that is one tensor is called "output"."""
    return [path or "output" for path in tree.paths()]


def trace(
    module: nn.Module,
    call: CallTree,
    leaves: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    *,
    train: bool,
    wants_grad: WantsGrad,
    strict: bool | None = None,
    running: Running = contextlib.nullcontext,
) -> Trace:
    """Trace `module` (a skeleton) on fake `leaves`; a `CaptureError` names the user's line."""
    errors: list[BaseException] = []
    for route in (_direct, _strict) if strict is None else (_strict if strict else _direct,):
        try:
            with _quiet_tracing(train):
                return route(module, call, leaves, mode, wants_grad, running)
        except UserError:
            raise
        except Exception as error:
            errors.append(error)
    # Of the direct route, whose traceback goes through the user's own lines.
    raise capture_error(errors[0], module) from errors[0]


def _direct(
    module: nn.Module,
    call: CallTree,
    leaves: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    wants_grad: WantsGrad,
    running: Running,
) -> Trace:
    flat = _Flat(module, call, wants_grad, running)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(_compiling_flag())
        stack.enter_context(fx_traceback.preserve_node_meta())  # torch does so itself for a joint graph only
        stack.enter_context(_module_names(module))
        joint = aot_export_joint_with_descriptors(stack, flat, tuple(leaves))
    assert flat.out_tree is not None
    return Trace(joint.graph_module, flat.param_names, flat.buffer_names, flat.out_tree)


def _strict(
    module: nn.Module,
    call: CallTree,
    leaves: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    wants_grad: WantsGrad,
    running: Running,
) -> Trace:
    with mode, running():
        read = call.call(dynamo_graph_capture_for_export(module), leaves)
    return _direct(read, call, leaves, mode, wants_grad, running)


@contextlib.contextmanager
def _compiling_flag() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` be true: libraries then avoid reading values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _quiet_tracing(train: bool) -> Iterator[None]:
    """Grad mode as asked, no warnings about our own way of tracing, and an outer trace's notes given back."""
    before: Any = fx_traceback.current_meta.get("custom")
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it repeats what our error says
    log_was_off, log.disabled = log.disabled, True
    with warnings.catch_warnings(), torch.set_grad_enabled(train):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            log.disabled = log_was_off
            if before is None:
                fx_traceback.current_meta.pop("custom", None)
            else:
                fx_traceback.current_meta["custom"] = before


@contextlib.contextmanager
def _module_names(module: nn.Module) -> Iterator[None]:
    """Hooks that write the running module's name where the tracer copies it to each node."""
    stack: list[Any] = []
    meta = fx_traceback.current_meta

    def enter(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            stack.append(meta.get("custom") or {})
            meta["custom"] = {"module": name}

        return hook

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        meta["custom"] = stack.pop() if stack else {}

    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(enter(name)))
        handles.append(part.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
