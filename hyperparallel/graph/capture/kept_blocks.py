"""Stand-ins for repeated blocks that are left out of a trace, and the evidence that this was right.

A deep model is traced with four of its repeats (`Reduction.kept`): the first, two from the middle
at positions of different parity, the last. The others are replaced by stand-ins of the same class
and attributes, at their own positions, that hand their input on. Meanwhile `Watch` checks what each
block is called with: the kept middle blocks show which argument is carried from block to block, and
every stand-in must be given the very same objects for all others. A block that reads its own layer
index is not taken for equal to its neighbours. Anything unusual is a doubt, and the caller then
traces the whole model instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyperparallel.graph.capture.batch_tree import Tree, flatten
from hyperparallel.graph.capture.blocks import Stack, is_position


@dataclass(frozen=True)
class Reduction:
    """Which repeats of a stack are traced.

    A *unit* is one period of blocks; the last unit also holds what is left over. `kept` are the
    unit indices (first, two middle ones, last) of `num_units`.
    """

    stack: Stack
    num_units: int
    kept: tuple[int, int, int, int]

    def unit(self, index: int) -> int:
        """The unit of the block at `index`."""
        return min(index // self.stack.period, self.num_units - 1)

    @property
    def dropped(self) -> list[int]:
        return [i for i in range(len(self.stack.blocks)) if self.unit(i) not in self.kept]


def reduce_stack(stack: Stack) -> Reduction | None:
    """How to shorten `stack`, or None if it is too short to gain from it.

    The two middle units are the second, and the last but one or two: whichever has the other
    parity.
    """
    units = len(stack.blocks) // stack.period
    # Four are traced anyway.
    if units < 5:
        return None
    # Unit 1 is odd, so the other is even: blocks that alternate by parity in code are found to differ.
    other = units - 2 if units % 2 == 0 else units - 3
    return Reduction(stack, units, (0, 1, other, units - 1))


@dataclass
class _Call:
    tree: Tree
    leaves: list[torch.Tensor]
    result: Tree | None = None
    result_leaves: list[torch.Tensor] | None = None


class Watch:
    """Follows the calls of one reduced stack; `doubt` says why repeats may differ ("" if not)."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.doubt = ""
        self._calls: dict[int, _Call] = {}

    def stand_ins(self) -> dict[int, nn.Module]:
        """For each dropped block (by object id) the module to put in its place."""
        blocks = self.reduction.stack.blocks
        return {id(blocks[i]): self._stand_in(blocks[i], i) for i in self.reduction.dropped}

    def attach(self, container: nn.Module) -> None:
        """Follow the kept blocks of the traced copy's container (the copy is thrown away after)."""
        for index, key in enumerate(self.reduction.stack.keys):
            if self.reduction.unit(index) in self.reduction.kept:
                block = container._modules[key]
                assert block is not None
                self._watch_positions(block, index)
                block.register_forward_pre_hook(self._enter(index), with_kwargs=True)
                block.register_forward_hook(self._leave(index))

    def _watch_positions(self, block: nn.Module, index: int) -> None:
        """A forward that reads its layer's index may do anything with it: that is a doubt."""
        for part in list(block.modules()):
            keys = [key for key, value in vars(part).items() if is_position(key, value, index)]
            if keys:
                watched = {key: property(self._reader(key, index)) for key in keys}
                # A property of the class wins over the instance's attribute: reading it is seen.
                part.__class__ = type(type(part).__name__, (type(part),), watched)

    def _reader(self, key: str, index: int) -> Callable[[nn.Module], int]:
        def read(_module: nn.Module) -> int:
            self.doubt = f"a block reads its own {key}"
            return index

        return read

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            # AOTAutograd runs the forward more than once; each run starts with the first block.
            if index == 0:
                self._calls.clear()
            self._record(index, args, kwargs)

        return hook

    def _leave(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, result: Any) -> None:
            call = self._calls[index]
            call.result, call.result_leaves = flatten(result)

        return hook

    def _record(self, index: int, args: Any, kwargs: Any) -> _Call:
        # A block called twice, or out of turn, is not a repeat of the one before.
        if index in self._calls or (index and index - 1 not in self._calls):
            self.doubt = f"block {index} is not called once and in order"
        tree, leaves = flatten((args, kwargs))
        self._calls[index] = _Call(tree, leaves)
        return self._calls[index]

    def _stand_in(self, block: nn.Module, index: int) -> nn.Module:
        twin = _hollow(block)
        twin.__class__ = type(
            type(block).__name__,
            (type(block),),
            {"forward": lambda _self, *args, **kwargs: self._pass_on(index, args, kwargs)},
        )
        return twin

    def _pass_on(self, index: int, args: Any, kwargs: Any) -> Any:
        """What a dropped block returns: its carried argument, nested as the kept blocks nest it."""
        period = self.reduction.stack.period
        call = self._record(index, args, kwargs)
        # The same block of the period in the first two units.
        first, second = (self._calls.get(index % period + unit * period) for unit in (0, 1))
        if first is None or second is None or second.result is None:
            raise RuntimeError("a repeated block is called before the first ones")
        # What differs between the first two calls is handed from block to block; the rest is the same object.
        carried = [i for i, x in enumerate(second.leaves) if x is not first.leaves[i]]
        assert second.result_leaves is not None
        if len(carried) != 1 or len(second.result_leaves) != 1:
            raise RuntimeError("repeated blocks carry more than one tensor")
        self._compare(call, second, carried[0])
        return second.result.rebuild(iter([call.leaves[carried[0]]]))

    def _compare(self, call: _Call, second: _Call, carried: int) -> None:
        assert second.result_leaves is not None
        here, there = call.leaves, second.leaves
        if not _alike(call.tree, second.tree) or len(here) != len(there):
            self.doubt = "repeated blocks are called with different arguments"
        elif any(x is not y for i, (x, y) in enumerate(zip(here, there, strict=True)) if i != carried):
            self.doubt = "repeated blocks are called with different tensors"
        elif _form(second.result_leaves[0]) != _form(here[carried]):
            self.doubt = "repeated blocks change the form of what they carry"


def _form(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.device


def _alike(one: Tree, two: Tree) -> bool:
    return (
        (one.kind, one.value, one.type, one.keys) == (two.kind, two.value, two.type, two.keys)
        and len(one.children) == len(two.children)
        and all(map(_alike, one.children, two.children))
    )


def _hollow(module: nn.Module) -> nn.Module:
    """The same class and attributes, without parameters or buffers."""
    # Not `type(module)(...)`: the constructor's arguments are not known, and its work not wanted.
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = dict.fromkeys(module._parameters)
    twin._buffers = dict.fromkeys(module._buffers)
    twin._modules = {key: None if child is None else _hollow(child) for key, child in module._modules.items()}
    return twin
