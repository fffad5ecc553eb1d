"""One collective for a block's parameters and one for its gradients: counts, order and results."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperparallel as hp
from hyperparallel.cluster import Rates
from hyperparallel.graph import communication
from hyperparallel.graph.build import Built, build
from hyperparallel.graph.passes.bucket import bucket
from hyperparallel.graph.passes.coalesce import coalesce
from hyperparallel.graph.passes.overlap import overlap
from hyperparallel.graph.passes.peephole.sweeps import peephole
from hyperparallel.graph.program import RankProgram
from hyperparallel.runtime.module.certify import certify_built
from tests.graph.capture.families import seeded

pytestmark = pytest.mark.fake

NUM_BLOCKS = 3
ALONE = (peephole, bucket, overlap)
"""The passes without joining."""


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Stack(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.into = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(NUM_BLOCKS))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.into(x)
        for block in self.blocks:
            h = block(h)
        return {"loss": self.out(h).square().mean()}


def made(ranks: int, zero: int = 3, width: int = 12, inner: int = 24) -> tuple[Stack, dict[str, Any], Built]:
    torch.manual_seed(0)
    model = Stack(width, inner).double()
    batch = {"x": torch.randn(2 * ranks + 1, 4, dtype=torch.float64)}
    mesh = hp.Layout((ranks,), ("dp",))
    built = build(model, hp.Plan(mesh, fsdp="dp", zero=zero), (), batch, loss="loss")
    return model, batch, built


def calls(program: RankProgram, *targets: Any) -> list[Any]:
    return [n for n in program.graph.nodes if n.op == "call_function" and n.target in targets]


GATHERS = (communication.all_gather_start, communication.all_gather_many_start)
SCATTERS = (communication.reduce_scatter_start, communication.reduce_scatter_many_start)


def test_a_block_is_gathered_and_reduced_in_one_collective_each() -> None:
    program = made(2)[-1].rank_program(0)
    count = Counter((t.kind, t.module, t.backward) for t in program.transfers() if t.module)
    last = NUM_BLOCKS - 1
    for i in range(NUM_BLOCKS):
        assert count["all_gather", f"blocks.{i}", False] == 1
        # The forward still has the last block when the backward begins.
        assert count["all_gather", f"blocks.{i}", True] == (0 if i == last else 1)
        assert count["reduce_scatter", f"blocks.{i}", True] == 1
    assert not any(m.startswith("blocks.") and m.count(".") > 1 for _, m, _ in count)


def test_no_byte_more_is_moved_and_what_is_there_is_not_gathered_again() -> None:
    built = made(2)[-1]
    joined = built.rank_program(0).transfers()
    alone = dataclasses.replace(built, rank_passes=(peephole, bucket)).rank_program(0).transfers()

    def moved(found: Any, kind: str, backward: bool) -> int:
        return sum(t.num_bytes for t in found if t.kind == kind and t.backward == backward)

    for kind, backward in (("all_gather", False), ("reduce_scatter", True)):
        assert moved(joined, kind, backward) == moved(alone, kind, backward) > 0
    assert moved(joined, "all_gather", True) < moved(alone, "all_gather", True)
    assert len(joined) < len(alone) / 2


def test_the_next_block_is_under_way_while_one_is_computed_with() -> None:
    program = made(2)[-1].rank_program(0)
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    first, second, third = calls(program, communication.all_gather_many_start)[:NUM_BLOCKS]
    waits = [next(iter(start.users)) for start in (first, second, third)]
    assert place[first] < place[waits[0]] < place[second] < place[waits[1]] < place[third]
    between = [n for n in program.graph.nodes if place[second] < place[n] < place[waits[1]]]
    assert any(n.target is torch.ops.aten.tanh.default for n in between)


@pytest.mark.parametrize(
    "ranks, zero, width, inner", [(2, 3, 12, 24), (3, 3, 10, 7), (4, 2, 5, 3), (3, 1, 7, 4)]
)
def test_results_are_those_of_one_device_however_uneven(
    ranks: int, zero: int, width: int, inner: int
) -> None:
    model, batch, built = made(ranks, zero, width, inner)
    for passes in (built.rank_passes, ALONE):
        for joint in (True, False):
            programs = [
                dataclasses.replace(built, rank_passes=passes).rank_program(rank, joint=joint)
                for rank in range(ranks)
            ]
            assert len({len(list(p.graph.nodes)) for p in programs}) == 1
            assert all(bool(calls(p, *communication.SINGLE)) == (passes is not ALONE) for p in programs)
        certificate = certify_built(model, dataclasses.replace(built, rank_passes=passes), (), batch)
        assert certificate.replicas_agree and max(certificate.errors.values()) <= 1e-12, str(certificate)


def test_apart_from_the_backward_nothing_is_shared_between_phases() -> None:
    program = made(2)[-1].rank_program(0, joint=False)
    starts = calls(program, *GATHERS)
    count = Counter((n.meta["transfer"].module, n.meta["backward"]) for n in starts)
    assert all(count[f"blocks.{i}", backward] == 1 for i in range(NUM_BLOCKS) for backward in (False, True))


def test_only_what_is_handed_out_is_reduced_together() -> None:
    """A reduction that somebody in the program waits for goes as soon as it can."""
    model, batch = seeded("llama", 1)
    mesh = hp.Layout((2, 2), ("dp", "tp"))
    plan = hp.Plan(mesh, params={"*.down_proj.weight": mesh(None, "tp")}, fsdp="dp")
    slow_links = Rates(90e9, 8e9, 3e9, 0.0)  # activations are cut along the sequence
    program = build(model, plan, (), batch, loss="loss", rates=slow_links).rank_program(0)
    singles = [s for s in calls(program, SCATTERS[0]) if s.args[-1] == ("tp",)]
    assert singles and calls(program, SCATTERS[1])
    for start in calls(program, *SCATTERS):
        (wait,) = start.users
        if start.target is communication.reduce_scatter_start:
            continue
        assert all(user.op == "output" for item in wait.users for user in item.users)


def test_constants_and_programs_without_cut_parameters_stay_as_they_are() -> None:
    model, batch, _ = made(2)
    whole = build(model, hp.Plan(hp.Layout((2,), ("dp",))), (), batch, loss="loss")
    before = dataclasses.replace(whole, rank_passes=(peephole,)).rank_program(0)
    nodes = [n.target for n in before.graph.nodes]
    assert [n.target for n in coalesce(before).graph.nodes] == nodes
