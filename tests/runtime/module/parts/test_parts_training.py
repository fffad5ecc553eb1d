"""Steps in parts with all that training asks for: accumulation, clipping, dropout, tied weights, evaluation.

The oracle is always plain torch on one device: the same batches, the same seed, `clip_grad_norm_`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.errors import RunError
from hyperparallel.graph.parts import Part
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.micro_batches import split_batch
from hyperparallel.runtime.module.parts import PartsStep
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import integers, made, numbers

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]
Run = tuple[list[float], list[float], dict[str, Tensor], Tensor]
"""Losses, norms, parameters and changed buffers, and the state of the random generator afterwards."""
SEED = 11


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def called(model: nn.Module, batch: Any) -> Tensor:
    found = model(**batch) if isinstance(batch, dict) else model(batch)
    loss: Tensor = found["loss"] if isinstance(found, dict) else found
    return loss


def alone(model: nn.Module, batches: Sequence[Any], micros: int = 1, clip: float = 0.5) -> Run:
    """Plain torch. micros: forwards per step, whose losses are averaged (so let them be equally large)."""
    optimizer, losses, norms = adam(list(model.named_parameters())), [], []
    torch.manual_seed(SEED)
    for batch in batches:
        parts = [called(model, micro) / micros for micro in split_batch(batch, micros)]
        loss = sum(parts, start=torch.zeros(()))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    values = {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    return losses, norms, values, torch.get_rng_state()


def in_parts(
    make: Callable[[], nn.Module], parts: dict[str, Part], batches: Sequence[Any], size: int, **options: Any
) -> list[Run]:
    """What each rank of a job of `size` sees; ranks of no part do nothing."""
    members = {rank for part in parts.values() for rank in part.plan.mesh.ranks}

    def run(rank: int) -> Run | None:
        if rank not in members:
            return None
        step = PartsStep(make(), adam, parts, batches[0], clip=0.5, **options)
        torch.manual_seed(SEED)
        found = [step.step(batch) for batch in batches]
        held = {n: p for n, p in step.model.named_parameters() if isinstance(p, DTensor)}
        values = {name: p.full_tensor().detach() for name, p in held.items()}
        values |= {name: b for name, b in step.model.named_buffers() if not b.is_meta}
        drawn = torch.get_rng_state()
        return [each.loss for each in found], [each.grad_norm for each in found], values, drawn

    return [found for found in run_ranks(size, run, timeout=110) if found is not None]


def assert_same(found: list[Run], true: Run) -> None:
    seen: set[str] = set()
    for losses, norms, values, drawn in found:
        assert losses == pytest.approx(true[0], rel=1e-9)
        assert norms == pytest.approx(true[1], rel=1e-9)
        for name, value in values.items():
            # Both clip by norm + 1e-6; AdamW's first steps divide small gradients by themselves.
            torch.testing.assert_close(value, true[2][name], rtol=1e-7, atol=1e-7)
        assert torch.equal(drawn, true[3]), "the generators of all ranks went as far as one device's"
        seen |= set(values)
    assert seen == set(true[2])


def mesh(*ranks: int, **axes: int) -> Mesh:
    return Mesh(tuple(axes.values()) or (len(ranks),), tuple(axes) or ("dp",), ranks)


def plans(one: Plan, other: Plan, front: list[str], back: list[str]) -> dict[str, Part]:
    return {"front": Part(front, one), "back": Part(back, other)}


EMBED, HEAD = ["embed"], ["head"]
TP = mesh(0, 1, tp=2)
TOKENS = {
    "dp then tp": plans(Plan(mesh(0, 1)), Plan(mesh(2, 3, tp=2)), EMBED, HEAD),
    "zero 2 then 1": plans(Plan(mesh(1, 3), fsdp="dp", zero=2), Plan(mesh(0)), EMBED, HEAD),
    "zero 1 and 3, one mesh": plans(
        Plan(mesh(0, 2), fsdp="dp", zero=1), Plan(mesh(0, 2), fsdp="dp"), EMBED, HEAD
    ),
    "tp then dp of 3": plans(Plan(TP, {"embed.weight": TP("tp", None)}), Plan(mesh(1, 2, 3)), EMBED, HEAD),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", TOKENS)
def test_accumulated_and_clipped_steps_are_those_of_the_batch(name: str, accumulate: int) -> None:
    """Micro-batches of 3 + 2 + 2 rows with few valid labels, then another shape, then the first again."""
    ids = integers(11, 7, 6)
    labels = ids.clone()
    labels[0, :5] = labels[3] = labels[6] = -100
    batches = [{"ids": ids[:rows], "labels": labels[:rows]} for rows in (7, 7, 4, 7)]
    true = alone(made(small.NextToken), batches)
    found = in_parts(lambda: made(small.NextToken), TOKENS[name], batches, 4, accumulate=accumulate)
    assert_same(found, true)


DROPPED = {
    "two": plans(Plan(mesh(0, 1)), Plan(mesh(2, 3, tp=2)), ["first", "inner"], ["second", "outer"]),
    "in the middle": plans(Plan(mesh(0)), Plan(mesh(1, 2)), ["first", "inner", "second"], ["outer"]),
    "overlapping": plans(Plan(mesh(0, 1, tp=2)), Plan(mesh(1, 2)), ["first"], ["inner", "second", "outer"]),
    "three": {
        "a": Part(["first"], Plan(mesh(2))),
        "b": Part(["inner"], Plan(mesh(0, 1))),
        "c": Part(["second", "outer"], Plan(mesh(1, 3))),
    },
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_is_that_of_one_device(name: str, accumulate: int) -> None:
    """Every number, also of the second part and of later steps; and all generators stay alike."""
    batches = [numbers(6, 4, seed=seed) for seed in range(3)]
    true = alone(made(small.Dropped), batches, micros=accumulate)
    losses, norms = ([x * accumulate for x in each] for each in true[:2])  # its loss is a sum
    assert_same(
        in_parts(lambda: made(Halved, accumulate), DROPPED[name], batches, 4, accumulate=accumulate), true
    )
    assert losses[0] != losses[1] and norms


class Halved(small.Dropped):
    """A sum over rows, divided as the oracle divides it."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.by


class Noisy(nn.Module):
    """Code of the model itself draws: before the first part, and behind the last with nothing read."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.drop, self.back = nn.Linear(4, 6), nn.Dropout(0.4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        y: Tensor = self.back(torch.tanh(self.drop(self.front(x + noise))))
        return (y - noise + torch.rand(4, dtype=x.dtype)).pow(2).mean()


def test_noise_of_the_model_itself_is_that_of_one_device() -> None:
    batches = [numbers(6, 4, seed=seed) for seed in range(3)]
    parts = plans(Plan(mesh(0, 1)), Plan(mesh(2, 3, tp=2)), ["front"], ["drop", "back"])
    assert_same(in_parts(lambda: made(Noisy), parts, batches, 4), alone(made(Noisy), batches))


TIED = {
    "dp then tp": plans(Plan(mesh(0, 1)), Plan(mesh(2, 3, tp=2)), EMBED, HEAD),
    "cut by rows, then zero 3": plans(
        Plan(TP, {"embed.weight": TP("tp", None)}), Plan(mesh(1, 2), fsdp="dp"), EMBED, HEAD
    ),
    "zero 2 then 1": plans(Plan(mesh(1, 3), fsdp="dp", zero=2), Plan(mesh(0)), EMBED, HEAD),
    "one mesh": plans(Plan(mesh(0, 1)), Plan(mesh(0, 1)), EMBED, HEAD),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", TIED)
def test_a_weight_of_two_parts_gets_both_gradients(name: str, accumulate: int) -> None:
    batches = [integers(7, 6, 3, seed=seed) for seed in range(4)]
    true = alone(made(small.Tied), batches)
    assert_same(in_parts(lambda: made(small.Tied), TIED[name], batches, 4, accumulate=accumulate), true)


class Thrice(nn.Module):
    """A weight that three parts use, and a frozen layer between the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.two.weight = self.three.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.one(x))))
        return self.three(torch.tanh(self.two(x))).pow(2).mean()  # type: ignore[no-any-return]


def test_weights_of_three_parts() -> None:
    batches = [numbers(6, 4, seed=seed) for seed in range(3)]
    parts = {
        "a": Part(["one", "frozen"], Plan(mesh(0, 1))),
        "b": Part(["two"], Plan(mesh(1, 2, tp=2))),
        "c": Part(["three"], Plan(mesh(3))),
    }
    true = alone(made(Thrice), batches)
    assert_same(in_parts(lambda: made(Thrice), parts, batches, 4, accumulate=2), true)


class Helped(nn.Module):
    """Each part has a loss of its own; the result is their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.front(x))
        return self.back(y).pow(2).mean() + 0.1 * y.pow(4).mean()  # type: ignore[no-any-return]


def test_losses_of_several_parts_are_summed() -> None:
    batches = [numbers(6, 4, seed=seed) for seed in range(3)]
    parts = plans(Plan(mesh(0, 1)), Plan(mesh(2, 3, tp=2)), ["front"], ["back"])
    assert_same(
        in_parts(lambda: made(Helped), parts, batches, 4, accumulate=2), alone(made(Helped), batches)
    )


class Normed(nn.Module):
    """A layer with statistics, and dropout behind it: evaluation differs from training in both."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: behind it the norm leaves a gradient of rounding errors only, which Adam scales up.
        self.linear, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.drop(self.norm(self.linear(x))))
        return y.pow(2).mean()


def test_evaluation_between_steps_changes_nothing() -> None:
    """Its loss is that of the plain model in evaluation mode; random state and statistics stay."""
    batches = [numbers(6, 4, seed=seed) for seed in range(3)]
    other = numbers(5, 4, seed=9)
    parts = plans(Plan(mesh(0, 1)), Plan(mesh(2, 3, tp=2)), ["linear", "norm"], ["drop", "head"])
    plain = made(Normed)
    optimizer, true = adam(list(plain.named_parameters())), []
    torch.manual_seed(SEED)
    for batch in batches:
        plain.eval()
        true.append(float(plain(other).detach()))
        plain.train()
        loss = plain(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        true.append(float(loss.detach()))

    def run(rank: int) -> tuple[list[float], bool]:
        step, found = PartsStep(made(Normed), adam, parts, batches[0]), []
        torch.manual_seed(SEED)
        for batch in batches:
            step.model.eval()
            found.append(step.evaluate(other))
            step.model.train()
            found.append(step.step(batch).loss)
        return found, step.model.get_buffer("norm.running_mean").is_meta

    for rank, (found, is_meta) in enumerate(run_ranks(4, run, timeout=110)):
        assert found == pytest.approx(true, rel=1e-9)
        assert is_meta == (rank >= 2), "a buffer that another part changes has no memory here"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"clip": 1.0}, "the update of a step.*option clip: None on rank.*, 1.0 on rank 1"),
        ({"lr": 0.2}, r"the update of part front.*lr of linear.weight: 0.1 on rank 0, 0.2 on rank 1"),
    ],
)
def test_ranks_that_would_update_otherwise_are_found(how: dict[str, float], words: str) -> None:
    parts = plans(Plan(mesh(0, 1)), Plan(mesh(2)), ["linear", "norm"], ["drop", "head"])

    def run(rank: int) -> str:
        mine = how if rank == 1 else {}

        def sgd(named: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for _, p in named], lr=mine.get("lr", 0.1))

        try:
            PartsStep(made(Normed), sgd, parts, numbers(6, 4), clip=mine.get("clip"))
        except RunError as error:
            return str(error)
        return ""

    found = run_ranks(3, run, timeout=110)
    assert all(re.search(words, told) for told in found[:2]), found


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).sum()


def test_a_backward_frees_what_its_part_saved_as_it_goes() -> None:
    names = [str(i) for i in range(12)]
    parts = plans(Plan(mesh(0)), Plan(mesh(1)), names[:10], names[10:])

    def run(rank: int) -> list[int]:
        layers = [layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())]
        model = nn.Sequential(*layers, Summed()).double()
        step = PartsStep(model, adam, parts, numbers(6, 4))
        if rank == 1:
            step.step(numbers(6, 4))
            return []
        (program,) = step.programs.values()
        forward = program.forward
        watched: list[weakref.ref[Tensor]] = []
        alive: list[int] = []
        held = {p.data_ptr() for p in step.params.values()}

        def noted(*given: Any) -> Any:
            found = forward(*given)
            saved = [x for x in program._saved.values() if x.data_ptr() not in held]
            watched.extend(map(weakref.ref, saved))
            return found

        program.forward = noted  # type: ignore[method-assign]
        with program.compiled.marked("backward", lambda: alive.append(sum(w() is not None for w in watched))):
            step.step(numbers(6, 4))
        return [len(watched), alive[0], alive[len(alive) // 2], alive[-1]]

    (count, first, middle, last), _ = run_ranks(2, run, timeout=110)
    assert first == count >= 5 and middle < 0.8 * count and last <= 1
