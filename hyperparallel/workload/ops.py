"""The read-only picture of a program that the deciders see: values, and the ops that make them.

A `Workload` is extracted from a captured joint forward/backward FX graph (`graph/capture/extract.py`).
Nothing here imports torch, so a decision can be made, tested and explained on any machine. Shapes are global.
There is no second IR: nothing rewrites a `Workload`; passes rewrite the FX graph and look decisions up
by value name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hyperparallel.layout import Layout


@dataclass(frozen=True)
class Value:
    """One tensor of the program. `shape` is global, `dtype` a torch name without prefix ("float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """
        >>> Value("x", (2, 3), "float32", 4).num_bytes
        24
        """
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Ref:
    """A use of a value inside an op's arguments."""

    name: str


@dataclass(frozen=True)
class Op:
    """One operation.

    `target` is the ATen overload ("aten.mm.default"); `args`/`kwargs` hold `Ref`s, numbers, strings and
    nested tuples. `inputs` are the value names in order of appearance in args, then kwargs (a value used
    twice appears twice). `outputs` are value names, None where an output is not a tensor or unused.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    backward: bool = False
    module: str = ""
    block: tuple[str, int, str] | None = None
    """(kind of repeated block, index of the repeat, name within the block), or None outside blocks."""

    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]] | None = None
    """What the user's own per-rank code takes and gives, by operand and result; None for any other op."""


@dataclass(frozen=True)
class Workload:
    """A program: ops in order, and which values are parameters, buffers, inputs, outputs, gradients.

    `params`, `buffers` map a qualified name to its value name; `param_aliases` maps each tied name to the
    name it is stored under. `inputs` maps a path in the batch ("input_ids") to a value name, `outputs` a
    path in the result ("loss") likewise. `grads` maps a parameter to the value of its gradient (frozen
    parameters have none); `input_grads` a batch path likewise; `mutations` a buffer to its new value.
    `tangents` are the values that carry the outputs' incoming gradients.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    grads: Mapping[str, str]
    tangents: Mapping[str, str] = field(default_factory=dict)
    input_grads: Mapping[str, str] = field(default_factory=dict)
    mutations: Mapping[str, str] = field(default_factory=dict)
    param_aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        return {out: op for op in self.ops for out in op.outputs if out is not None}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Op, ...]]:
        users: dict[str, list[Op]] = {name: [] for name in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                users[name].append(op)
        return {name: tuple(ops) for name, ops in users.items()}

    @cached_property
    def casts(self) -> Mapping[str, tuple[str, ...]]:
        """For each parameter's value, the values that are it in fewer bits: what ranks gather of it."""
        found: dict[str, list[str]] = {value: [] for value in self.params.values()}
        for op in self.ops:
            if op.target == "aten._to_copy.default" and op.inputs[0] in found and op.outputs[0]:
                before, after = self.values[op.inputs[0]], self.values[op.outputs[0]]
                if after.itemsize < before.itemsize:
                    found[before.name].append(after.name)
        return {value: tuple(casts) for value, casts in found.items()}

    def names_of_params(self) -> dict[str, str]:
        """Every name that a parameter may be declared by, tied ones too, and its value."""
        return {**self.params, **{alias: self.params[name] for alias, name in self.param_aliases.items()}}

    def sources(self) -> Iterator[str]:
        """Values that no op makes: parameters, buffers, inputs, tangents."""
        for group in (self.params, self.buffers, self.inputs, self.tangents):
            yield from dict.fromkeys(group.values())
