"""How often gradients are reduced in a step: once each, however many micro-batches there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from hyperparallel.graph.build import Built, build
from hyperparallel.graph.program import RankProgram, Transfer
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.shard.batchwise import over_rows
from tests.graph.capture import families
from tests.runtime.module import small
from tests.runtime.module.small import integers, made, numbers

pytestmark = pytest.mark.fake
DP, DP_TP = Layout((2,), ("dp",)), Layout((2, 2), ("dp", "tp"))
DP_FSDP = Layout((2, 2), ("dp", "fsdp"))
PLANS = {
    "dp": Plan(DP),
    "dp tp": Plan(DP_TP, {"*.mlp.c_fc.weight": DP_TP(None, "tp")}),
    "zero 1": Plan(DP, fsdp="dp", zero=1),
    "zero 3": Plan(DP, fsdp="dp"),
    "zero 3 in replicas": Plan(DP_FSDP, fsdp="fsdp"),
    "sequence": Plan(
        DP_TP,
        {"*.mlp.c_fc.weight": DP_TP(None, "tp"), "*.attn.c_proj.weight": DP_TP("tp", None)},
        activations={"transformer.h.*.ln_*": DP_TP("dp", "tp", None)},
    ),
}


@cache
def built(plan: str, micro_batches: int, family: str = "gpt2") -> Built:
    model, batch = families.seeded(family, 2)
    batch = {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in batch.items()}  # a row for each rank
    return build(model, PLANS[plan], (), batch, loss="loss", micro_batches=micro_batches)


def programs(found: Built, defer: bool) -> tuple[RankProgram, list[Transfer], list[Transfer]]:
    """The program of a micro-batch, what it sends in its backward, and what is sent once a step."""
    program = found.rank_program(0, defer=defer)
    once = found.reduction_program(program).transfers() if defer else []
    return program, [t for t in program.transfers() if t.backward], once


def reductions(transfers: list[Transfer], axis: str) -> list[str]:
    """The values that are summed over an axis; small ones travel together."""
    found = [t for t in transfers if axis in t.axes and t.kind in ("all_reduce", "reduce_scatter")]
    return [value for t in found for value in t.value.split(", ")]


@pytest.mark.parametrize("plan", ["dp", "dp tp", "zero 1"])
def test_gradients_are_reduced_once_a_step(plan: str) -> None:
    """28 gradients of GPT-2, 13 of them biases: 28 reductions, in 1 micro-batch or after 4."""
    one, four = built(plan, 1), built(plan, 4)
    assert len(one.workload.grads) == 28
    _, each, once = programs(one, False)
    assert len(reductions(each, "dp")) == len(one.workload.grads) and not once
    program, each, once = programs(four, True)
    assert reductions(each, "dp") == []
    assert sorted(reductions(once, "dp")) == sorted(four.workload.grads.values())
    assert all(("dp", "sum") in spec.partial for spec in program.grad_specs.values())
    if plan != "zero 1":
        assert sum(t.num_bytes for t in once) <= sum(p.num_bytes for p in four.workload.values.values())
        assert len(once) == 1, "one message for all"


def test_what_a_reduction_shrinks_is_reduced_in_every_micro_batch() -> None:
    """Zero 3 keeps pieces of gradients; over replicas, and over tp for norms, they still wait."""
    _, each, once = programs(built("zero 3", 4), True)
    assert len(reductions(each, "dp")) == 28 and not once
    program, each, once = programs(built("zero 3 in replicas", 4), True)
    assert len(reductions(each, "fsdp")) == 28 and reductions(each, "dp") == []
    assert len(reductions(once, "dp")) == 28 and reductions(once, "fsdp") == []
    for name, spec in program.grad_specs.items():
        assert spec.dims == built("zero 3 in replicas", 4).decisions.stored[name].dims
    norms = {v for n, v in built("sequence", 4).workload.grads.items() if ".h." in n and ".ln_" in n}
    _, each, once = programs(built("sequence", 4), True)
    assert not norms & {*reductions(each, "tp"), *reductions(each, "dp")}
    assert norms <= set(reductions(once, "dp")) and norms <= set(reductions(once, "tp"))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_nothing_is_reduced_early_in_any_family(family: str) -> None:
    program, each, _ = programs(built("dp", 4, family), True)
    assert reductions(each, "dp") == []
    assert all(spec.partial for spec in program.grad_specs.values())


def test_a_mean_loss_sends_its_sum_and_its_count() -> None:
    (loss,) = (t for t in built("dp", 1).rank_program(0).transfers() if not t.backward)
    assert loss.kind == "all_reduce" and loss.num_bytes == 2 * 4


class Divided(nn.Module):
    """A sum over the batch divided by a number; for 0, the root of a mean."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(4, 3).double(), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).pow(2)
        return y.sum() / self.by if self.by else y.mean().sqrt()


CLASSES = {"x": numbers(4, 4), "target": integers(7, 4)}
LOSSES: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor], str]] = {
    "a sum of squares": (lambda: made(small.Rows), {"x": numbers(4, 4)}, "sum"),
    "a mean of squares": (lambda: made(small.Tied), {"ids": integers(7, 4, 5)}, "mean"),
    "constants added to a mean": (lambda: made(small.Shared), {"x": numbers(4, 4)}, "mean"),
    "statistics of the batch": (lambda: made(small.Batch), {"x": numbers(4, 4)}, "unknown"),
    "a sum over classes": (lambda: made(small.Classes, "sum"), CLASSES, "sum"),
    "unreduced, then summed": (lambda: made(small.Classes, "none"), CLASSES, "sum"),
    "a mean over labels": (lambda: made(small.Classes), CLASSES, "labels"),
    "a mean weighted by class": (lambda: made(small.Classes, "mean", True), CLASSES, "unknown"),
    "a sum divided by the rows": (lambda: Divided(4.0), {"x": numbers(4, 4)}, "unknown"),
    "a sum divided by another number": (lambda: Divided(3.0), {"x": numbers(4, 4)}, "sum"),
    "a root of a mean": (lambda: Divided(0.0), {"x": numbers(4, 4)}, "unknown"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_is_over_the_rows(name: str) -> None:
    make, batch, expected = LOSSES[name]
    found = build(make(), PLANS["dp"], (), batch, loss="")
    (value,) = found.workload.outputs.values()
    assert over_rows(found.workload, found.rules, value) == expected


@pytest.mark.parametrize("family", families.FAMILIES)
def test_losses_of_models_are_means_over_labels(family: str) -> None:
    found = built("dp", 4, family)
    assert over_rows(found.workload, found.rules, found.workload.outputs["loss"]) == "labels"
