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
from dataclasses import fields, replace
from typing import Any

from hyperparallel.errors import UserError, nearest
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

# Answers by the full name that was asked for. They stand apart from the tables, so that a rule that is
# registered for a name without overload still reaches overloads that were asked for before it came.
_ASKED_RULES: dict[str, Builder | None] = {}
_ASKED_FACTS: dict[str, OpFacts] = {}


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
    found = _ASKED_FACTS.get(target)
    if found is None:
        base = target.rpartition(".")[0]
        plain = base.removesuffix("_")
        found = _FACTS.get(target) or _FACTS.get(base) or _FACTS.get(plain) or UNKNOWN_OP
        if plain != base or "out" in target[len(base) :]:  # what it makes is memory that it is given
            found = replace(found, fresh=False, in_place=())
        _ASKED_FACTS[target] = found
    return found


def _find(target: str) -> Builder | None:
    if target not in _ASKED_RULES:
        base = target.rpartition(".")[0]
        _ASKED_RULES[target] = (
            _TABLE.get(target) or _TABLE.get(base) or _TABLE.get(base.removesuffix("_"))
        )
    return _ASKED_RULES[target]


def register_rule(
    target: str,
    rule: str | Builder,
    *,
    linear: InputGroups | None = None,
    reduce: str | None = "sum",
    **facts: Any,
) -> None:
    """Give the rule of an op, in one string or as a function `(op, values) -> Rule`.

    target: the op's name ("mylib.rotate.default"; "mylib.rotate" for every overload).
    linear, reduce: as in `Rule`, of a rule given as a string; a function says them in the rule that it
    makes. facts: fields of `OpFacts`, by which the op is priced and treated; by default it costs the
    memory that it touches, and its results may share memory with its operands. Raises `UserError` for a
    rule that cannot be read, a fact that there is not, and `linear` or `reduce` beside a function.

    >>> register_rule("mylib.scale", "b d, d -> b d", linear=((0,), (1,)), fresh=True)
    """
    known = [field.name for field in fields(OpFacts)]
    for name in facts:
        if name not in known:
            raise UserError("register_rule", name, f"a fact of {', '.join(known)}", nearest(name, known, 1))
    if not isinstance(rule, str):
        for field_name, given, usual in (("linear", linear, None), ("reduce", reduce, "sum")):
            if given != usual:
                allowed = "left out: a function gives it in the Rule that it returns"
                raise UserError(field_name, given, allowed)
    _TABLE[target] = line(rule, linear or (), reduce) if isinstance(rule, str) else rule
    _FACTS[target] = OpFacts(**facts)
    _ASKED_RULES.clear()
    _ASKED_FACTS.clear()
