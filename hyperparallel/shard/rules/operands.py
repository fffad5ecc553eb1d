"""How a rule builder reads one op: its shapes, its arguments, and one-line builders from notation.

A builder is a function `(op, values) -> Rule`; the tables in the sibling files map an ATen name to
one. `line` makes a builder from a notation, which is what most ops need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from hyperparallel.shard.rules.notation import Pattern, Shape, bind, parse
from hyperparallel.shard.rules.rule import FactorDims, Rule
from hyperparallel.workload.ops import Op, Ref, Value

OpValues = Mapping[str, Value]
Builder = Callable[[Op, OpValues], Rule]
InputGroups = tuple[tuple[int, ...], ...]

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz") + tuple(f"d{i}" for i in range(26, 64))
"""Factor names that a builder gives to dims it has no better name for."""


def argument(op: Op, position: int, name: str = "", default: Any = None) -> Any:
    """The argument at `position`, or by `name`, or its default."""
    if position < len(op.args):
        return op.args[position]
    return op.kwargs.get(name, default)


def in_shapes(op: Op, values: OpValues) -> list[Shape]:
    """Shapes of the tensor operands, in order."""
    return [values[name].shape for name in op.inputs]


def out_shapes(op: Op, values: OpValues) -> list[Shape | None]:
    """Shapes of the results, None for one that is not a tensor, or unused."""
    return [None if name is None else values[name].shape for name in op.outputs]


def present(op: Op, places: tuple[int | str, ...]) -> list[bool]:
    """Which optional tensor arguments (positions, or names of keyword arguments) are given."""
    given = []
    for place in places:
        value = (
            op.kwargs.get(place)
            if isinstance(place, str)
            else op.args[place]
            if place < len(op.args)
            else None
        )
        given.append(isinstance(value, Ref))
    return given


def renumber(groups: InputGroups, given: list[bool]) -> InputGroups:
    """Linear groups over all operands, restricted to those given and numbered without gaps."""
    position: dict[int, int] = {}
    for old, there in enumerate(given):
        if there:
            position[old] = len(position)
    # A group whose members are all absent is no way through the op.
    kept = (tuple(position[i] for i in group if i in position) for group in groups)
    return tuple(group for group in kept if group)


def bind_given(
    op: Op,
    values: OpValues,
    text: str,
    given: list[bool],
    linear: InputGroups = (),
    groups: int | None = None,
) -> Rule:
    """The rule of an op that may lack some of the operands of its notation.

    given: which it has. linear: groups over all of them. groups: the size of the factor g.
    """
    pattern = parse(text)
    kept = tuple(d for d, there in zip(pattern.inputs, given, strict=True) if there)
    return bind(
        Pattern(kept, pattern.outputs, pattern.blocked, text),
        in_shapes(op, values),
        out_shapes(op, values),
        # The shapes give g times c only: how many groups there are is an argument.
        sizes=None if groups is None else {"g": groups},
        linear=renumber(linear, given),
    )


def line(
    text: str,
    linear: InputGroups = (),
    reduce: str | None = "sum",
    at: tuple[int | str, ...] | None = None,
) -> Builder:
    """A builder from one notation.

    at: where each operand of the notation stands in the arguments (a position, or a keyword), for
        ops with optional tensors; those not given are left out.
    """
    whole = parse(text)

    def build(op: Op, values: OpValues) -> Rule:
        pattern, groups = whole, linear
        if at is not None:
            given = present(op, at)
            if not all(given):
                kept = tuple(d for d, there in zip(whole.inputs, given, strict=True) if there)
                pattern = type(whole)(kept, whole.outputs, whole.blocked, whole.text)
                groups = renumber(linear, given)
        shapes = tuple(in_shapes(op, values)), tuple(out_shapes(op, values))
        return _bound(pattern, *shapes, groups, reduce)

    return build


@lru_cache(maxsize=4096)
def _bound(
    pattern: Pattern,
    inputs: tuple[Shape, ...],
    outputs: tuple[Shape | None, ...],
    linear: InputGroups,
    reduce: str | None,
) -> Rule:
    return bind(pattern, inputs, outputs, linear=linear, reduce=reduce)


def uncut(op: Op, values: OpValues) -> Rule:
    """The rule that cuts nothing: every dim of every operand is a factor of its own, blocked."""
    sizes: dict[str, int] = {}

    def own(shape: Shape, prefix: str) -> FactorDims:
        dims: list[tuple[str, ...]] = []
        for i, size in enumerate(shape):
            if size == 1:
                dims.append(())
            else:
                sizes[f"{prefix}{i}"] = size
                dims.append((f"{prefix}{i}",))
        return tuple(dims)

    inputs = tuple(own(shape, f"i{k}_") for k, shape in enumerate(in_shapes(op, values)))
    outputs = tuple(
        None if shape is None else own(shape, f"o{k}_")
        for k, shape in enumerate(out_shapes(op, values))
    )
    return Rule(inputs, outputs, sizes, blocked=frozenset(sizes), reduce=None)


def along(shape: Shape, names: tuple[str, ...] = LETTERS) -> tuple[FactorDims, dict[str, int]]:
    """One factor per dim of `shape`, and their sizes; dims of size one are made of none."""
    dims = tuple((names[i],) if size != 1 else () for i, size in enumerate(shape))
    return dims, {names[i]: size for i, size in enumerate(shape) if size != 1}


def empty_of(sizes: Mapping[str, int]) -> frozenset[str]:
    """Factors of size zero: there is nothing to cut."""
    return frozenset(name for name, size in sizes.items() if size == 0)
