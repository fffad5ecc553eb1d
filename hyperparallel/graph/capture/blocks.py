"""Find the repeated blocks of a module, and mark the graph nodes that belong to each.

A stack is a `ModuleList` or `Sequential` in which structurally equal modules repeat: same classes,
same parameter and buffer shapes, same plain attributes except a layer index that equals the
position, same entry in every per-layer list of the configuration ("layer_types"). Equal blocks have
one *kind*. A node belongs to the block whose module ran it; a backward node to the block whose
forward it differentiates; a gradient sum to the block of the node before it (autograd adds a
gradient where it arrives).

Left out: blocks called more than once or not kept in such a container are not stacks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

_MODULE_KEYS = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Stack:
    """A container of repeated blocks: its qualified name, the blocks' names and signatures."""

    name: str
    keys: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    signatures: tuple[Hashable, ...]

    def kind(self, index: int) -> str:
        """What is equal for equal blocks: "model.layers", or "model.layers:5" if kinds differ."""
        first = self.signatures.index(self.signatures[index])
        return self.name if self.period == 1 else f"{self.name}:{first}"

    @cached_property
    def period(self) -> int:
        """The smallest number of blocks after which the kinds repeat (all if they never do)."""
        signs = self.signatures
        return next(
            p for p in range(1, len(signs) + 1) if all(signs[i] == signs[i - p] for i in range(p, len(signs)))
        )


def find_stacks(module: nn.Module) -> list[Stack]:
    """The outermost stacks of `module`, in registration order."""
    stacks: list[Stack] = []
    shared = Counter(id(p) for part in module.modules() for p in part._parameters.values())
    for name, part in module.named_modules():
        # Only outermost stacks: what repeats inside a block is copied with it.
        inside = any(not s.name or f"{name}.".startswith(f"{s.name}.") for s in stacks)
        if inside or not isinstance(part, (nn.ModuleList, nn.Sequential)) or len(part) < 2:
            continue
        blocks = tuple(part)
        # A tied parameter would get its gradient from several blocks: they do not stand for one another.
        if any(shared[id(p)] > 1 for block in blocks for p in block.parameters()):
            continue
        lists = list(_layer_lists(module, name, len(blocks)))
        signs = tuple(_signature(b, i, lists) for i, b in enumerate(blocks))
        # Modules without parameters (activations in a Sequential) are no blocks.
        if len(set(signs)) < len(signs) and all(any(True for _ in b.parameters()) for b in blocks):
            stacks.append(Stack(name, tuple(part._modules), blocks, signs))
    return stacks


def _layer_lists(module: nn.Module, name: str, length: int) -> Iterator[Sequence[Any]]:
    """Lists with one entry per layer in the configurations of a container's owners."""
    pieces = name.split(".") if name else []
    for depth in range(len(pieces) + 1):
        # "layer_types" and the like: equal modules may be told apart by the configuration alone.
        config = getattr(module.get_submodule(".".join(pieces[:depth])), "config", None)
        for value in vars(config).values() if hasattr(config, "__dict__") else ():
            if isinstance(value, (list, tuple)) and len(value) == length:
                yield value


def _signature(block: nn.Module, index: int, lists: Iterable[Sequence[Any]]) -> Hashable:
    parts: list[Hashable] = [_plain(values[index], index, "") for values in lists]
    for name, part in block.named_modules():
        tensors = tuple(
            (key, None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.requires_grad))
            for key, x in (*part._parameters.items(), *part._buffers.items())
        )
        # Hooks are code: a block with another one is another block.
        hooks = tuple(
            id(hook)
            for key in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
            for hook in vars(part).get(key, {}).values()
        )
        plain = tuple(
            (key, _plain(value, index, key))
            for key, value in sorted(vars(part).items())
            if key not in _MODULE_KEYS
        )
        parts.append((name, type(part), tensors, hooks, plain))
    return tuple(parts)


def is_position(key: str, value: Any, index: int) -> bool:
    """Whether a block's attribute holds nothing but the block's position."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value == index
    return whole and any(sign in key for sign in ("idx", "index", "layer"))


def _plain(value: Any, index: int, key: str) -> Hashable:
    """A hashable stand-in for an attribute; a layer index that equals the position is one value."""
    if is_position(key, value, index):
        return "position"
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, (bool, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(_plain(item, index, "") for item in value))
    if isinstance(value, dict):
        return tuple((str(k), _plain(item, index, "")) for k, item in value.items())
    if isinstance(value, functools.partial):
        return (
            _plain(value.func, index, ""),
            _plain(value.args, index, ""),
            _plain(value.keywords, index, ""),
        )
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        # A method bound to the block itself: its instance differs from block to block, its code does not.
        return (type(value.__self__), value.__func__.__code__)
    # Equal code does not make equal functions where a closure holds other values.
    if isinstance(value, types.FunctionType) and not value.__closure__:
        return (value.__code__, value.__defaults__ and repr(value.__defaults__))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple((f.name, _plain(getattr(value, f.name), index, "")) for f in dataclasses.fields(value))
    # Unknown objects are equal only if they are one.
    return id(value)


def mark_blocks(graph: fx.Graph, stacks: Sequence[Stack]) -> None:
    """Write `meta["block"] = (kind, index, local name)` on every node of a repeated block."""
    marker = _Marker(stacks)
    before: tuple[Stack, int, str] | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        summed = node.meta.get("is_gradient_acc", False)
        # Autograd adds a gradient where the later summand arrives: in the block of the node before.
        found = before if summed else marker.find((node.meta.get("custom") or {}).get("module", ""))
        if found is not None:
            marker.mark(node, *found)
        before = found


class _Marker:
    def __init__(self, stacks: Sequence[Stack]) -> None:
        self._stacks = stacks
        self._found: dict[str, tuple[Stack, int, str] | None] = {}
        self._used: Counter[tuple[str, int, str]] = Counter()

    def find(self, path: str) -> tuple[Stack, int, str] | None:
        """The stack, block index and name inside the block of a module path."""
        if path not in self._found:
            self._found[path] = next(iter(self._search(path)), None)
        return self._found[path]

    def _search(self, path: str) -> Iterator[tuple[Stack, int, str]]:
        for stack in self._stacks:
            prefix = f"{stack.name}." if stack.name else ""
            key, _, rest = path.removeprefix(prefix).partition(".")
            if path.startswith(prefix) and key in stack.keys:
                yield stack, stack.keys.index(key), rest

    def mark(self, node: fx.Node, stack: Stack, index: int, inside: str) -> None:
        target = node.target
        packet = getattr(target, "_overloadpacket", target)
        op = str(getattr(packet, "__name__", packet))
        backward = "bwd" if node.meta.get("partitioner_tag") == "is_backward" else ""
        base = ".".join(piece for piece in (inside, backward, op) if piece)
        count = self._used[(stack.name, index, base)]
        self._used[(stack.name, index, base)] += 1
        node.meta["block"] = (stack.kind(index), index, f"{base}_{count}" if count else base)


def why_interleaved(graph: fx.Graph, stack: Stack) -> str:
    """Why the marked nodes of `stack` do not run block by block; "" if they do.

    Forward nodes must come in the order of the blocks with nothing between them, backward nodes in
    the reverse order.
    """
    kinds = {stack.kind(i) for i in range(len(stack.blocks))}
    for backward in (False, True):
        order: list[int] = []
        between = ""
        for node in graph.nodes:
            tag = node.meta.get("partitioner_tag") == "is_backward"
            if node.op in ("placeholder", "output") or tag != backward:
                continue
            kind, index, _ = node.meta.get("block", ("", 0, ""))
            if kind not in kinds:
                # In front of the first block and behind the last anything may run.
                between = between or (node.name if order else "")
            elif between:
                return f"{between} runs between two blocks"
            else:
                # Negative in the backward, so that one test of sortedness serves both.
                order.append(-index if backward else index)
        if order != sorted(order):
            return "the blocks do not run one after the other"
    return ""
