"""The one list of random ops agrees with what torch says of them."""

from __future__ import annotations

import pytest
import torch

from hyperparallel.graph.local.random import FORMS, stand_in
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


X = torch.zeros(4, 6, 8)


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.transpose(0, 2),
        X[:, ::2],
        X[:, :1].transpose(1, 2),
        X.transpose(1, 2)[:, :, 1:],
        X.unsqueeze(1).expand(-1, 3, -1, -1),
        X.transpose(0, 1).unsqueeze(2).expand(-1, -1, 5, -1),
        torch.zeros(3).expand(4, 3),
    ],
)
def test_numbers_are_drawn_in_the_memory_order_of_the_operand(x: torch.Tensor) -> None:
    """A stand-in of the same size draws what the operand draws, expanded operands included."""
    both = (x, stand_in(x, tuple(x.shape)))
    drawn = [torch.rand_like(like, generator=torch.Generator().manual_seed(1)) for like in both]
    assert torch.equal(*drawn)
