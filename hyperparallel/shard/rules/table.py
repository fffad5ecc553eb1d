"""The table of sharding rules: which dims of an op move together, for every ATen op we know.

`rule_for` builds the rule of one op from its shapes and arguments. Names are looked up with their
overload first ("aten.sum.dim_IntList"), then without ("aten.sum"), then without the underscore of
an in-place op. An op that is not found has no rule (None): `graph/probe.py` then tries it out.

The rules themselves stand beside this file, by kind: pointwise, views, matmul, reductions,
normalisation, attention, loss, indexing, factories. Building one costs a few microseconds, since
models repeat shapes and the builders remember them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hyperparallel.shard.rules import (
    attention,
    factories,
    indexing,
    loss,
    matmul,
    normalisation,
    pointwise,
    pooling,
    reductions,
    slices,
    views,
)
from hyperparallel.shard.rules.operands import Builder, InputGroups, line
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.workload.ops import Op, Value

_ROOMS = (
    pointwise, views, slices, matmul, reductions, normalisation, attention, loss, indexing,
    factories, pooling,
)  # fmt: skip
_TABLE: dict[str, Builder] = {name: rule for room in _ROOMS for name, rule in room.RULES.items()}


def rule_for(op: Op, values: Mapping[str, Value]) -> Rule | None:
    """The sharding rule of `op`, or None if its target is unknown.

    >>> shapes = {"x": (8, 4), "w": (4, 6), "y": (8, 6)}
    >>> values = {name: Value(name, shape, "float32", 4) for name, shape in shapes.items()}
    >>> rule_for(Op("mm", "aten.mm.default", (), {}, ("x", "w"), ("y",)), values).outputs
    ((('m',), ('n',)),)
    """
    builder = _find(op.target)
    return None if builder is None else builder(op, values)


def is_random(target: str) -> bool:
    """Whether an op draws random numbers, so that leaving it out would shift those drawn later.

    >>> is_random("aten.native_dropout.default"), is_random("aten.add.Tensor")
    (True, False)
    """
    base = target.rpartition(".")[0]
    return bool({target, base, base.removesuffix("_")} & factories.RANDOM)


def _find(target: str) -> Builder | None:
    builder = _TABLE.get(target)
    if builder is None:
        base = target.rpartition(".")[0]
        builder = _TABLE.get(base) or _TABLE.get(base.removesuffix("_"))
        if builder is not None:
            _TABLE[target] = builder
    return builder


def register_rule(
    target: str, rule: str | Builder, *, linear: InputGroups = (), reduce: str | None = "sum"
) -> None:
    """Give the rule of an op, in one string or as a function `(op, values) -> Rule`.

    target: the op's name ("mylib.rotate.default"; "mylib.rotate" for every overload).
    linear, reduce: as in `Rule`, for a rule given as a string. Raises `UserError` if it cannot be
    read.

    >>> register_rule("mylib.scale", "b d, d -> b d", linear=((0,), (1,)))
    """
    _TABLE[target] = line(rule, linear, reduce) if isinstance(rule, str) else rule
