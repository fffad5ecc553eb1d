"""The one list of random ops agrees with what torch says of them."""

from __future__ import annotations

import pytest
import torch

from hyperparallel.graph.local.random import FORMS
from hyperparallel.shard.rules.table import _FACTS, _TABLE, facts_of

pytestmark = pytest.mark.fake
RANDOM = {name for name, facts in _FACTS.items() if facts.random and name.startswith("aten.")}
SEEDED = torch.Tag.nondeterministic_seeded


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads that a name of the tables means: one, or all of an op."""
    _, op, *overload = name.split(".")
    packet = getattr(torch.ops.aten, op)
    return [getattr(packet, one) for one in overload or packet.overloads()]


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_torch_calls_each_of_them_random(name: str) -> None:
    # `aten.dropout` is a composite: the op that it becomes carries the tag.
    assert name == "aten.dropout" or any(SEEDED in op.tags for op in overloads(name))


def test_no_other_op_of_the_rules_is_random() -> None:
    missed = {
        name
        for name in set(_TABLE) - RANDOM
        if not facts_of(name).random and name.startswith("aten.")
        and hasattr(torch.ops.aten, name.split(".")[1]) and any(SEEDED in op.tags for op in overloads(name))
    }  # fmt: skip
    # Attention draws its dropout inside the kernel, and has rules and a seed of its own.
    assert {name for name in missed if "attention" not in name} == set()


def test_forms_are_given_to_random_ops_only() -> None:
    assert set(FORMS) <= RANDOM
