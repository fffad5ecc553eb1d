"""What users register for their own ops: wrong facts are refused with the op's name, the last word counts."""

from __future__ import annotations

from typing import Any

import pytest

from hyperparallel.errors import UserError
from hyperparallel.shard.own_rule import register_rule
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import facts_of, rule_for
from hyperparallel.workload import Op, Ref, Value

pytestmark = pytest.mark.pure
SHAPES = {"x": (6, 4), "w": (4,), "y": (6, 4)}
VALUES = {name: Value(name, shape, "float32", 4) for name, shape in SHAPES.items()}
DIMS = (("b",), ("d",))
OP = Op("op", "ruled.scale.default", (Ref("x"), Ref("w")), {}, ("x", "w"), ("y",))


def scale(rule: Any = "b d, d -> b d", target: Any = "ruled.scale", **facts: Any) -> Rule | None:
    register_rule(target, rule, **facts)
    return rule_for(OP, VALUES)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"linear": ((0,), (2,))}, r"linear of ruled\.scale.*2 operands"),
        ({"linear": (0, 1)}, r"linear of ruled\.scale: got \(0, 1\)"),
        ({"linear": "0"}, r"linear of ruled\.scale: got '0'"),
        ({"reduce": "mean"}, r"reduce of ruled\.scale: got 'mean'.*'max'"),
        ({"fresh": "yes"}, "fresh: got 'yes'; allowed: True or False"),
        ({"flops": -1.0}, r"flops: got -1\.0"),
        ({"exchanges": 1.5}, r"exchanges: got 1\.5"),
        ({"in_place": (0, True)}, r"in_place: got \(0, True\)"),
        ({"not_looped": "d"}, r"not_looped: got 'd'.*as \('f',\)"),
        ({"not_looped": (1,)}, r"not_looped: got \(1,\)"),
        ({"reduction_at": "2"}, "reduction_at: got '2'"),
        ({"group": 3}, "group: got 3; allowed: text"),
        ({"rule": None}, r"rule of ruled\.scale: got None"),
        ({"rule": lambda op, values: None, "reduce": None}, r"rule of ruled\.scale.*a function gives"),
        ({"target": "ruled::scale"}, 'target: got .*write "ruled.scale" instead'),
        ({"target": 3}, "target: got int 3"),
    ],
)
def test_a_wrong_fact_is_refused_when_it_is_registered(facts: dict[str, Any], words: str) -> None:
    before = scale()
    known = facts_of(OP.target)
    with pytest.raises(UserError, match=words):
        scale(**facts)
    assert rule_for(OP, VALUES) == before, "nothing of a refused registration stays"
    assert facts_of(OP.target) == known


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("b d, d -> b d, b d", "notation.*1 results, as the op has"),
        ("b d, d, d -> b d", "notation.*2 operands"),
        ("b d c, d -> b d", "2 dims instead of 3"),
        (lambda op, values: 1 // 0, "ZeroDivisionError"),
        (lambda op: None, "TypeError.*function"),
        (lambda op, values: "b d, d -> b d", "a Rule, or None"),
        (lambda op, values: Rule((DIMS,), (DIMS,), {"b": 6, "d": 4}), "1 operands.*2, as the op has"),
    ],
)
def test_a_rule_that_does_not_fit_its_op_is_refused_with_its_name(rule: Any, words: str) -> None:
    with pytest.raises(UserError, match=rf"rule of ruled\.scale.*{words}"):
        scale(rule)


def test_what_is_registered_last_counts_for_every_overload() -> None:
    first = scale("b d, d -> b d")
    second = scale("b [d], [d] -> b [d]", fresh=True)
    assert first is not None and second is not None
    assert not first.blocked and second.blocked == {"d"}
    assert facts_of(OP.target).fresh


def test_factors_that_are_not_looped_over_are_those_of_the_rule() -> None:
    assert scale(flops=2.0, not_looped=("d",)) is not None
    assert facts_of(OP.target).not_looped == ("d",)
    with pytest.raises(UserError, match=r"not_looped of ruled\.scale: got \('z',\).*: b, d"):
        scale(flops=2.0, not_looped=("z",))
    scale()
