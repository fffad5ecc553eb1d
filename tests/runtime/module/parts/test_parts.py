"""Parts of a model on meshes of their own, in one job, train as the whole does on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.errors import PlanError, RunError, UserError
from hyperparallel.graph import parts as parts_module
from hyperparallel.graph.parts import Part
from hyperparallel.layout import Mesh, SendRecv
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.parts import PartsStep
from tests.models import plain_decoder, token_batches
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import made, numbers

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]
STEPS = 4


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def alone(
    model: nn.Module, batches: list[Any], loss: Callable[[Any], Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = adam(list(model.named_parameters())), []
    for x in batches:
        found = loss(model(x))
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def in_parts(
    make: Callable[[], nn.Module], parts: dict[str, Part], batches: list[Any], num_ranks: int
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Each rank's losses, and the parameters that it holds a piece of, brought together."""

    def run(rank: int) -> Any:
        step = PartsStep(make(), adam, parts, batches[0])
        losses = [step.step(x).loss for x in batches]
        held = {n: p for n, p in step.model.named_parameters() if isinstance(p, DTensor)}
        others = [p for p in step.model.parameters() if not isinstance(p, DTensor)]
        assert all(p.is_meta for p in others)
        assert all(p.numel() <= held[n].numel() for n, p in step.params.items())
        return losses, {n: p.full_tensor().detach() for n, p in held.items()}

    return run_ranks(num_ranks, run, timeout=110)


def assert_same(found: Any, true: Any, parts: dict[str, Part]) -> None:
    seen: set[str] = set()
    for rank, (losses, params) in enumerate(found):
        assert losses == pytest.approx(true[0], rel=1e-10, abs=0), rank
        for name, p in params.items():
            torch.testing.assert_close(p, true[1][name], rtol=1e-10, atol=1e-10)
        seen |= set(params)
        assert bool(params) == any(rank in part.plan.mesh.ranks for part in parts.values())
    assert seen == set(true[1])


def mesh(**axes: Any) -> Mesh:
    ranks = axes.pop("ranks")
    return Mesh(tuple(axes.values()), tuple(axes), ranks)


TP = mesh(tp=2, ranks=(0, 1))
FRONT, BACK = ["embed", "blocks.0"], ["blocks.1", "head"]
DECODERS: dict[str, dict[str, Part]] = {
    "tp then dp": {
        "front": Part(FRONT, Plan(TP, {"blocks.*.up.weight": TP("tp", None)})),
        "back": Part(BACK, Plan(mesh(dp=2, ranks=(2, 3)))),
    },
    "fsdp then tp": {
        "front": Part(FRONT, Plan(mesh(dp=2, ranks=(3, 1)[::-1]), fsdp="dp")),
        "back": Part(BACK, Plan(mesh(tp=2, ranks=(0, 2)))),
    },
    "1 then 3": {
        "front": Part(FRONT, Plan(mesh(dp=1, ranks=(3,)))),
        "back": Part(BACK, Plan(mesh(dp=3, ranks=(0, 1, 2)))),
    },
    "2 then 1": {
        "front": Part(FRONT, Plan(mesh(dp=2, ranks=(0, 1)))),
        "back": Part(BACK, Plan(mesh(tp=1, ranks=(2,)))),
    },
    "overlapping": {
        "front": Part(FRONT, Plan(mesh(dp=2, ranks=(0, 1)))),
        "back": Part(BACK, Plan(mesh(dp=3, ranks=(1, 2, 3)))),
    },
    "three parts, two on one mesh": {
        "front": Part(["embed"], Plan(mesh(dp=2, ranks=(0, 1)))),
        "middle": Part(["blocks.*"], Plan(mesh(dp=2, tp=1, ranks=(2, 3)))),
        "back": Part(["head"], Plan(mesh(dp=2, ranks=(0, 1)))),
    },
}


@pytest.mark.parametrize("name", DECODERS)
def test_halves_of_a_decoder_train_apart(name: str) -> None:
    batches, parts = token_batches(STEPS), DECODERS[name]
    true = alone(plain_decoder(torch.float64), batches, lambda result: result["loss"])
    size = 1 + max(rank for part in parts.values() for rank in part.plan.mesh.ranks)
    assert_same(in_parts(lambda: plain_decoder(torch.float64), parts, batches, size), true, parts)


class Skips(nn.Module):
    """A value of the first part that the third reads too, a mask of the batch, a buffer, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.0, 6))

    def forward(self, x: Tensor) -> Tensor:
        keep = (x.sum(1, keepdim=True) > 0).to(x.dtype) + 0.5
        a = torch.tanh(self.first(x)) * self.scale
        b = self.frozen(torch.relu(self.second(a * keep))) + a
        y: Tensor = self.third(b * a) * keep
        return y.pow(2).mean()


def test_values_skip_parts_and_masks_are_made_again() -> None:
    parts = {
        "a": Part(["first"], Plan(mesh(dp=2, ranks=(0, 1)))),
        "b": Part(["second", "frozen"], Plan(mesh(tp=2, ranks=(1, 2)))),
        "c": Part(["third"], Plan(mesh(dp=1, ranks=(3,)))),
    }
    batches = [numbers(6, 4, seed=seed) for seed in range(STEPS)]
    true = alone(made(Skips), batches, lambda loss: loss)
    assert_same(in_parts(lambda: made(Skips), parts, batches, 4), true, parts)


class Counts(nn.Module):
    """A buffer that the first layer's result changes after the second's has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x)
        loss: Tensor = (self.back(y) + self.seen).pow(2).mean()
        self.seen.add_(y.detach().mean())  # type: ignore[operator]
        return loss


class Poisson(nn.Module):
    """How many numbers are drawn depends on the rates."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x)
        loss: Tensor = self.back(y + torch.poisson(y.detach().abs())).pow(2).mean()
        return loss


class Scores(small.Rows):
    """A result for each row."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y.pow(2).sum(1)


def two(front: list[str], back: list[str], *, num: int = 2) -> list[Part]:
    others = mesh(dp=num - 1, ranks=range(1, num))
    return [Part(front, Plan(mesh(dp=1, ranks=(0,)))), Part(back, Plan(others))]


def test_pieces_cross_between_meshes_once() -> None:
    """What leaves the first mesh is one copy of the activation, and of its gradient on the way back."""
    parts = list(DECODERS["tp then dp"].values())
    built = parts_module.build_parts(plain_decoder(torch.float64), parts, (token_batches(1)[0],))
    assert [(e.source, e.target, e.backward) for e in built.edges] == [(0, 1, False), (1, 0, True)]
    for edge in built.edges:
        sent = [step for step in edge.steps if isinstance(step, SendRecv)]
        assert len(sent) == 1
        moved = sum(block.num_elements for block in sent[0].blocks(edge.value.shape))
        assert moved == edge.value.numel


@pytest.mark.parametrize(
    ("model", "parts", "words"),
    [
        (small.Rows, two(["down"], ["up"]), "parts in the order in which the forward goes"),
        (small.Rows, two(["up"], ["dwon"]), "nearest: down"),
        (small.Rows, two(["up"], ["up", "down"]), "up in parts 0 and 1"),
        (Counts, two(["front"], ["back"]), "buffer seen in parts [0, 1]"),
        (Poisson, two(["front"], ["back"]), "draw equally often whatever values they see"),
        (small.Dropped, two(["outer", "second"], ["inner", "first"]), "parts in the order in which"),
        (small.Rows, [], "one or more parts"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: type[nn.Module], parts: list[Part], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        parts_module.build_parts(made(model), parts, (numbers(6, 4),))
    assert words in str(caught.value)


def test_what_a_step_in_parts_refuses() -> None:
    parts = {str(i): part for i, part in enumerate(two(["up"], ["down"], num=3))}

    def run(rank: int) -> None:
        if rank == 3:
            with pytest.raises(PlanError, match="rank 3 of the job's 4"):
                PartsStep(made(small.Rows), adam, parts, numbers(6, 4))
            return
        step = PartsStep(made(small.Rows), adam, parts, numbers(6, 4))
        with pytest.raises(UserError, match=r"PartsStep.evaluate for a loss"):
            step.model(numbers(6, 4))
        with pytest.raises(UserError, match="not parallelized yet"):
            PartsStep(step.model, adam, parts, numbers(6, 4))
        for wrong in ({"accumulate": 0}, {"clip": -1.0}, {"reduction": "max"}, {"accumulate": 9}):
            with pytest.raises(PlanError, match=next(iter(wrong))):
                PartsStep(made(small.Rows), adam, parts, numbers(6, 4), **wrong)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="a mapping of names to Parts"):
            PartsStep(made(small.Rows), adam, list(parts.values()), numbers(6, 4))  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="one number"):
            PartsStep(made(Scores), adam, parts, numbers(6, 4))
        other = dict(parts, **{"1": Part(["down"], Plan(mesh(tp=2, ranks=(1, 2))))} if rank == 2 else {})
        with pytest.raises(RunError, match=r"that differs is part 1, plan, mesh: .* on ranks 0, 1"):
            PartsStep(made(small.Rows), adam, other, numbers(6, 4))

    run_ranks(4, run, timeout=100)


@pytest.mark.parametrize(
    ("modules", "plan", "words"),
    [
        ("up", Plan(TP), r"modules: got 'up'; allowed: a list of patterns of names; write \['up'\]"),
        ([], Plan(TP), r"modules: got \[\]"),
        (["up"], "auto", "plan: got 'auto'; allowed: a Plan, with the mesh of this part"),
    ],
)
def test_what_makes_no_part_is_refused_when_it_is_written(modules: Any, plan: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Part(modules, plan)


@pytest.mark.parametrize("parts", [{}, [Part(["up"], Plan(TP))], {"front": ["up"]}])
def test_what_is_no_mapping_to_parts_is_refused(parts: Any) -> None:
    with pytest.raises(PlanError, match=r"parts.*: got .*(a mapping of names to|one or more|a Part)"):
        PartsStep(made(small.Rows), adam, parts, numbers(4, 4))
