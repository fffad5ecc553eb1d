"""Gradients in buckets: how many messages, what is in them, when they go, and the same results."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import hyperparallel as hp
from hyperparallel.cluster import Rates
from hyperparallel.graph import communication
from hyperparallel.graph.build import Built, build
from hyperparallel.graph.program import RankProgram
from hyperparallel.runtime.module.certify import certify_built
from tests.graph.capture.families import seeded

pytestmark = pytest.mark.fake
REDUCTIONS = (communication.all_reduce_start, communication.all_reduce_many_start)
DP = hp.Layout((2,), ("dp",))


class Odd(nn.Module):
    """A tied, a frozen and an unused weight, and two layers of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.twice, self.once = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(3, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.twice(torch.tanh(self.twice(self.embed(ids))))
        return {"loss": self.head(torch.tanh(self.frozen(self.once(x)))).square().mean()}


def made(model: nn.Module, batch: Any, latency_bytes: float, plan: hp.Plan, **more: Any) -> Built:
    """Decided for usual links, put in buckets for links on which a latency is worth so many bytes."""
    built = build(model, plan, (), batch, loss="loss", **more)
    decided = dataclasses.replace(built.decisions, rates=Rates(1e12, 1e11, 1e9, latency_bytes / 1e9))
    return dataclasses.replace(built, decisions=decided)


def llama(
    latency_bytes: float, plan: hp.Plan | None = None, dtype: torch.dtype = torch.float64, **more: Any
) -> Built:
    model, batch = seeded("llama", 1)
    batch = {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in batch.items()}
    return made(model.to(dtype), batch, latency_bytes, plan or hp.Plan(DP), **more)


def reductions(built: Built, program: RankProgram) -> list[fx.Node]:
    """The messages that gradients travel in."""
    grads = set(built.workload.grads.values())
    found = [n for n in program.graph.nodes if n.target in REDUCTIONS]
    return [start for start in found if grads.intersection(values(start))]


def values(start: fx.Node) -> list[str]:
    return list(start.meta["transfer"].value.split(", "))


def test_a_message_is_as_large_as_costs_least() -> None:
    rates, total = Rates(1.0, 1.0, 7.0, 0.3, {"dp": 5.0}), 1000.0
    for axes, bandwidth in ((("tp",), 7.0), (("tp", "dp"), 5.0)):

        def seconds(size: float, bandwidth: float = bandwidth) -> float:
            return total / size * 0.3 + size / bandwidth

        best = min((size / 100 for size in range(100, 20_000)), key=seconds)
        assert rates.message_bytes(axes, total) == pytest.approx(best, abs=0.01)


@pytest.mark.parametrize("latency_bytes", [0.0, 1_000.0, 10_000.0, 1e9])
def test_every_gradient_travels_once_in_messages_of_the_size_that_costs_least(latency_bytes: float) -> None:
    built = llama(latency_bytes)
    found = reductions(built, built.rank_program(0))
    sent = [value for start in found for value in values(start)]
    assert sorted(sent) == sorted(built.workload.grads.values())
    # Over two ranks a rank receives as many bytes as the tensor has.
    sizes = {value: built.workload.values[value].num_bytes for value in sent}
    most = math.sqrt(sum(sizes.values()) * latency_bytes)
    for start, following in zip(found, [*found[1:], None], strict=True):
        own = [sizes[value] for value in values(start)]
        assert start.meta["transfer"].num_bytes == sum(own)
        assert sum(own) <= most or len(own) == 1
        if following is not None:
            assert sum(own) + sizes[values(following)[0]] > most, "there was room"
    expected = {0.0: len(sent), 1e9: 1}.get(latency_bytes)
    assert expected is None or len(found) == expected
    assert expected is not None or 1 < len(found) < len(sent)


def made_by(program: RankProgram, node: fx.Node) -> fx.Node:
    """What computes the operand of a start, seen through casts and views."""
    while node.target in (torch.ops.aten._to_copy.default, torch.ops.aten.view.default):
        (node,) = node.all_input_nodes
    return node


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_message_goes_when_the_backward_has_made_the_last_of_its_gradients(dtype: torch.dtype) -> None:
    """With 16 bits too, where what travels is a cast of the gradient, written behind the backward."""
    built = llama(3_000.0, dtype=dtype)
    program = built.rank_program(0)
    nodes = list(program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    found = reductions(built, program)
    moved = "float32" if dtype == torch.bfloat16 else "float64"
    assert {start.meta["dtype"] for start in found} == {moved}
    local = {communication.wait, operator.getitem, torch.ops.aten._to_copy.default}
    computed = [i for i, n in enumerate(nodes) if n.op == "call_function" and n.target not in local]
    for start in found:
        last = max(place[made_by(program, x)] for x in start.all_input_nodes)
        between = [nodes[i] for i in computed if last < i < place[start] and nodes[i] not in found]
        assert len(between) <= 1, "at most what hands the gradient on"
    last_product = max(i for i in computed if nodes[i].target is torch.ops.aten.mm.default)
    assert sum(place[start] < last_product for start in found) >= len(found) / 2
    waits = [place[w] for start in found for w in start.users]
    for wait, following in zip(waits, found[1:], strict=False):
        assert wait > place[following], "one moves while the next is made ready"
    assert waits[-1] > last_product


@pytest.mark.parametrize("latency_bytes", [100.0, 1e9])
@pytest.mark.parametrize("joint", [True, False])
def test_results_are_those_of_one_device(latency_bytes: float, joint: bool) -> None:
    torch.manual_seed(0)
    model, batch = Odd().double(), {"ids": torch.randint(0, 11, (5, 3))}
    built = made(model, batch, latency_bytes, hp.Plan(DP))
    program = built.rank_program(1, joint=joint)
    names = sorted(name for start in reductions(built, program) for name in values(start))
    assert sorted({*names} - {"mean"}) == sorted(built.workload.grads.values()), "and perhaps the loss"
    assert set(built.workload.grads) == {"embed.weight", "twice.weight", "twice.bias", "once.weight"}
    certificate = certify_built(model, built, (), batch)
    assert certificate.replicas_agree and max(certificate.errors.values()) <= 1e-12, str(certificate)


def groups(built: Built) -> list[tuple[Any, ...]]:
    found = reductions(built, built.rank_program(0))
    return [(*start.args[1:], start.meta["dtype"], len(values(start))) for start in found]


def test_only_what_is_reduced_alike_travels_together() -> None:
    """A layer in float32 among others in float64; norms of a model that tp cuts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    model[1].float()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.layers[1](self.layers[0](x).float()).double()
            return {"loss": self.layers[2](h).square().mean()}

    batch = {"x": torch.randn(16, 4, dtype=torch.float64)}
    built = made(Mixed(), batch, 1e9, hp.Plan(DP))
    # The loss, a mean in float64, rides with its like.
    assert sorted(groups(built)) == [("sum", ("dp",), "float32", 2), ("sum", ("dp",), "float64", 5)]
    mesh = hp.Layout((2, 2), ("dp", "tp"))
    cut = {"*.up_proj.weight": mesh("tp", None), "*.down_proj.weight": mesh(None, "tp")}
    axes = {one[1] for one in groups(llama(1e9, hp.Plan(mesh, cut)))}
    assert ("dp",) in axes and all("dp" in one for one in axes)


def test_what_is_summed_over_micro_batches_travels_in_buckets_once() -> None:
    built = llama(3_000.0, micro_batches=2)
    program = built.rank_program(0, defer=True)
    assert reductions(built, program) == []
    found = reductions(built, built.reduction_program(program))
    sent = [value for start in found for value in values(start)]
    assert sorted(sent) == sorted(built.workload.grads.values())
    assert 1 < len(found) < len(sent)
