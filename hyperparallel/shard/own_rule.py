"""Give an op of your own its rule (`register_rule`), checked: what is wrong is said with the op's name,
before a solver meets it.

What can be read off the registration alone (the name, the text, groups, facts) is refused there; what needs
an op's operands is refused when its rule is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hyperparallel.errors import UserError, Words, nearest
from hyperparallel.shard.rules.notation import parse
from hyperparallel.shard.rules.operands import Builder, InputGroups, OpValues, in_shapes, line
from hyperparallel.shard.rules.rule import OpFacts, Rule
from hyperparallel.shard.rules.table import enter
from hyperparallel.workload.ops import Op

REDUCES = ("sum", "max", "min", "prod", None)
_TARGET = re.compile(r"\w+\.\w+(\.\w+)?")


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
    check_target(target)
    known = own_facts(facts)
    enter(target, own_rule(target, rule, linear, reduce, known), known)


def check_target(target: object) -> None:
    """Refuse what can't be the name of an op.

    >>> check_target("mylib::rotate")
    Traceback (most recent call last):
    hyperparallel.errors.UserError: target: got 'mylib::rotate'; allowed: library, op and, where it matters,\
 overload, with dots between; write "mylib.rotate" instead
    """
    if isinstance(target, str) and _TARGET.fullmatch(target):
        return
    dotted = str(target).replace("::", ".")
    hint = f'"{dotted if _TARGET.fullmatch(dotted) else "mylib.rotate.default"}"'
    given = target if isinstance(target, str) else Words(f"{type(target).__name__} {target}")
    raise UserError("target", given, "library, op and, where it matters, overload, with dots between", hint)


def own_facts(facts: Mapping[str, Any]) -> OpFacts:
    """The facts of an op; `UserError` for one that there is not, or whose value is of another kind."""
    known = {field.name: field.default for field in fields(OpFacts)}
    for name, value in facts.items():
        if name not in known:
            raise UserError("register_rule", name, f"a fact of {', '.join(known)}", nearest(name, known, 1))
        if name == "not_looped":
            if not isinstance(value, tuple) or not all(isinstance(factor, str) for factor in value):
                raise UserError(f"register_rule, {name}", value, "names of the rule's factors, as ('f',)")
        else:
            _check_fact(name, value, known[name])
    return OpFacts(**facts)


def _check_fact(name: str, value: object, default: object) -> None:
    """`value` must be of the kind of the fact's `default`, of which None stands for no position."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, bool):
        good, words = isinstance(value, bool), "True or False"
    elif isinstance(default, float):
        good, words = (number or isinstance(value, float)) and value >= 0, "a number of 0 or more"  # type: ignore[operator]
    elif isinstance(default, tuple):
        good, words = _positions(value), "positions of operands, as (0,)"
    elif isinstance(default, str):
        good, words = isinstance(value, str), "text"
    else:
        least = 0 if default is None else 1
        good = (number and value >= least) or (value is None and default is None)  # type: ignore[operator]
        words = f"a whole number of {least} or more"
    if not good:
        raise UserError(f"register_rule, {name}", value, words)


def _positions(value: object) -> bool:
    return isinstance(value, tuple) and all(type(i) is int and i >= 0 for i in value)


def own_rule(target: str, rule: object, linear: object, reduce: object, facts: OpFacts) -> Builder:
    """The builder of an op's rule from what was registered; its complaints name the op."""
    if isinstance(rule, str):
        return _named(target, _line(target, rule, () if linear is None else linear, reduce), facts)
    if not callable(rule):
        wanted = "a string, or a function (op, values) -> Rule"
        raise UserError(f"rule of {target}", rule, wanted, '"b k, k o -> b o"')
    if linear is not None or reduce != "sum":
        wanted = "linear and reduce beside a rule given as a string; a function gives them in its Rule"
        raise UserError(f"rule of {target}", Words("a function"), wanted)
    return _named(target, rule, facts)


def _line(target: str, text: str, linear: object, reduce: object) -> Builder:
    pattern = parse(text)
    if reduce not in REDUCES:
        raise UserError(f"reduce of {target}", reduce, ", ".join(map(repr, REDUCES)))
    _check_linear(target, linear, len(pattern.inputs))
    build = line(text, linear, reduce)  # type: ignore[arg-type]

    def exactly(op: Op, values: OpValues) -> Rule:
        if len(pattern.outputs) != len(op.outputs):
            raise UserError("notation", text, f"{len(op.outputs)} results, as the op has")
        return build(op, values)

    return exactly


def _check_linear(target: str, linear: object, count: int) -> None:
    groups: Any = linear if isinstance(linear, tuple) else (None,)
    if not all(_positions(group) and all(i < count for i in group) for group in groups):
        below = f"groups of positions of the {count} operands, as ((0,), (1,))"
        raise UserError(f"linear of {target}", linear, below)


def _named(target: str, build: Any, facts: OpFacts) -> Builder:
    def checked(op: Op, values: OpValues) -> Rule:
        about = f"rule of {target}"
        try:
            rule = build(op, values)
        except UserError as error:
            raise UserError(f"{about}, {error.field}", error.given, error.allowed, error.instead) from None
        except Exception as error:
            said = Words(f"{type(error).__name__}: {error}")
            raise UserError(about, said, "a function (op, values) that returns a Rule, or None") from error
        if rule is not None:
            _check_rule(about, rule, op, values, facts)
        return rule  # type: ignore[no-any-return]  # None: not known, the op is probed

    return checked


def _check_rule(about: str, rule: object, op: Op, values: OpValues, facts: OpFacts) -> None:
    if not isinstance(rule, Rule):
        raise UserError(about, rule, "a Rule, or None: not known", "register_rule(target, text) for a text")
    shapes = in_shapes(op, values)
    for what, have, wanted in (
        ("operands", len(rule.inputs), len(shapes)),
        ("results", len(rule.outputs), len(op.outputs)),
    ):
        if have != wanted:
            raise UserError(about, Words(f"a Rule of {have} {what}"), f"{wanted}, as the op has")
    _check_linear(about.removeprefix("rule of "), rule.linear, len(shapes))
    if not rule.sizes.keys() >= set(facts.not_looped):
        allowed = f"factors of the rule: {', '.join(rule.sizes)}"
        raise UserError(f"not_looped of {about.removeprefix('rule of ')}", facts.not_looped, allowed)
