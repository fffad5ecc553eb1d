"""The table of sharding rules: which dims of an op move together, for every ATen op we know.

`rule_for` builds the rule of one op from its shapes and arguments. Names are looked up with their
overload first ("aten.sum.dim_IntList"), then without ("aten.sum"), then without the underscore of
an in-place op. An op that is not found has no rule (None): `graph/probe.py` then tries it out.

The rules themselves stand beside this file, a family in each: pointwise, views, slices, matmul, reductions,
normalisation, attention, loss, indexing, factories, pooling. Building one costs a few microseconds, since
models repeat shapes and the builders remember them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
from hyperparallel.shard.rules.operands import Builder
from hyperparallel.shard.rules.rule import UNKNOWN_OP, OpFacts, Rule
from hyperparallel.workload.ops import Op, Value

_FAMILIES = (
    pointwise, views, slices, matmul, reductions, normalisation, attention, loss, indexing,
    factories, pooling,
)  # fmt: skip
_TABLE: dict[str, Builder] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
_FACTS: dict[str, OpFacts] = {
    name: facts for family in _FAMILIES for name, facts in getattr(family, "FACTS", {}).items()
}
# What was looked up by a name with its overload; a later registration may change either.
_ASKED: dict[str, OpFacts] = {}
_FOUND: dict[str, Builder | None] = {}


def rule_for(op: Op, values: Mapping[str, Value]) -> Rule | None:
    """The sharding rule of `op`, or None if its target is unknown.

    >>> shapes = {"x": (8, 4), "w": (4, 6), "y": (8, 6)}
    >>> values = {name: Value(name, shape, "float32", 4) for name, shape in shapes.items()}
    >>> rule_for(Op("mm", "aten.mm.default", (), {}, ("x", "w"), ("y",)), values).outputs
    ((('m',), ('n',)),)
    """
    builder = _find(op.target)
    return None if builder is None else builder(op, values)


def facts_of(target: str) -> OpFacts:
    """What is known of an op, named with its overload; the defaults where nothing is.

    >>> facts_of("aten.mm.default").flops, facts_of("aten.bernoulli_.float").random
    (2.0, True)
    >>> facts_of("aten.add.Tensor").fresh, facts_of("aten.add_.Tensor").fresh
    (True, False)
    """
    found = _ASKED.get(target)
    if found is None:
        base = target.rpartition(".")[0]
        plain = base.removesuffix("_")
        found = _FACTS.get(target) or _FACTS.get(base) or _FACTS.get(plain) or UNKNOWN_OP
        if plain != base or "out" in target[len(base) :]:  # what it makes is memory that it is given
            found = replace(found, fresh=False, in_place=())
        _ASKED[target] = found
    return found


def _find(target: str) -> Builder | None:
    if target not in _FOUND:
        base = target.rpartition(".")[0]
        names = (target, base, base.removesuffix("_"))
        _FOUND[target] = next((_TABLE[name] for name in names if name in _TABLE), None)
    return _FOUND[target]


def enter(target: str, builder: Builder, facts: OpFacts) -> None:
    """Give an op its rule and facts, over those that it may have."""
    _FACTS[target], _TABLE[target] = facts, builder
    _ASKED.clear()
    _FOUND.clear()
