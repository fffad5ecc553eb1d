"""`TrainStep`: accumulation, clipping, ZeRO stages and odd batches equal one step on one device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch.distributed.tensor import DTensor

from hyperparallel.errors import CaptureError, PlanError, UserError
from hyperparallel.graph import communication
from hyperparallel.graph.parts import Part
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.exec.codegen import FUNCTIONS
from hyperparallel.runtime.module import parts as parts_module
from hyperparallel.runtime.module import step as step_module
from hyperparallel.runtime.module.micro_batches import split_batch
from hyperparallel.runtime.module.parts import PartsStep
from hyperparallel.runtime.module.step import TrainStep
from tests.graph.capture import families
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import integers, made, numbers

pytestmark = pytest.mark.procs
DP2, TP2 = Layout((2,), ("dp",)), Layout((2,), ("tp",))
X = numbers(5, 4)


def on_ranks(n: int, check: Callable[[], Any], timeout: float = 180) -> list[Any]:
    return run_ranks(n, lambda rank: check(), timeout=timeout)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def whole_grads(step: TrainStep) -> dict[str, Tensor]:
    """The gradients that a step set, brought together."""
    found = {}
    for name in step.trained:
        held, local = step.model.get_parameter(name), step.params[name].grad
        assert isinstance(held, DTensor) and local is not None
        where = {"run_check": False, "shape": held.shape, "stride": held.stride()}
        grad = DTensor.from_local(local, held.device_mesh, held.placements, **where)
        found[name] = grad.full_tensor()
    return found


def assert_same_gradients(
    step: TrainStep, plain: nn.Module, batch: Any, loss: Callable[[Any], Tensor]
) -> None:
    got, true = step.gradients(batch), loss(plain)
    true.backward()
    torch.testing.assert_close(got, true.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    for name, grad in whole_grads(step).items():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


STAGES = {
    "dp": Plan(DP2),
    "zero 3": Plan(DP2, fsdp="dp", zero=3),
    "zero 2": Plan(DP2, fsdp="dp", zero=2),
    "zero 1": Plan(DP2, fsdp="dp", zero=1),
    "tp": Plan(TP2, {"head.weight": TP2("tp", None)}),
}


@pytest.mark.parametrize("name", STAGES)
def test_accumulated_micro_batches_equal_the_batch(name: str) -> None:
    """Also where the last ones are smaller, have few valid labels, or one row that can't be cut."""
    ids = integers(11, 7, 6)
    labels = ids.clone()
    labels[0, :5] = labels[3] = labels[6] = -100

    def check() -> None:
        for accumulate in (1, 2, 4):
            example = {"ids": ids, "labels": labels}
            step = TrainStep(made(small.NextToken), sgd, STAGES[name], example, accumulate=accumulate)
            for rows in (7, 5, 4):
                batch = {"ids": ids[:rows], "labels": labels[:rows]}
                plain = made(small.NextToken)
                assert_same_gradients(step, plain, batch, lambda m, b=batch: m(**b)["loss"])
            none = {"ids": ids, "labels": labels * 0 - 100}
            plain = made(small.NextToken)
            assert_same_gradients(step, plain, none, lambda m, b=none: m(**b)["loss"])

    on_ranks(2, check)


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_losses_of_micro_batches_are_put_together_as_they_are_over_rows(accumulate: int) -> None:
    """Sums, means, losses left unreduced and then summed, weighted sums; 5 rows are 5 x 1 or 3 + 2."""

    class Labelled(nn.Module):
        """A mean over rows, not over labels, whatever labels there are."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return (self.head(x) * labels[:, None]).pow(2).mean()

    class Counted(nn.Module):
        """A sum divided by what the caller counted, as transformers does."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 7)

        def forward(self, x: Tensor, target: Tensor, count: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(x), target, reduction="sum") / count

    target, labels = integers(7, 5), torch.tensor([3, -100, -100, 2, 1])
    cases: list[tuple[Callable[[], nn.Module], Any]] = [
        (lambda: made(small.Rows), {"x": X}),
        (lambda: made(small.Classes, "sum"), {"x": X, "target": target}),
        (lambda: made(small.Classes, "none"), {"x": X, "target": target}),
        (lambda: made(small.Classes, "sum", True, 0.1), {"x": X, "target": target}),
        (lambda: made(small.Classes, "mean"), {"x": X, "target": target}),
        (lambda: made(Labelled), {"x": X, "labels": labels}),
        (lambda: made(Counted), {"x": X, "target": target, "count": torch.tensor(5.0)}),
    ]

    def check() -> None:
        for make, batch in cases:
            for plan in (Plan(DP2), Plan(DP2, fsdp="dp")):
                step = TrainStep(make(), sgd, plan, batch, accumulate=accumulate)
                assert_same_gradients(step, make(), batch, lambda m, b=batch: m(**b))

    on_ranks(2, check)


def test_a_loss_with_a_denominator_of_its_own_wants_a_word() -> None:
    """A mean weighted by class, or by a mask: exact in one batch, refused in several unless told."""
    batch = {"x": X, "target": integers(7, 5)}

    def check() -> None:
        for args in (("mean", True), ("mean", False, 0.1)):
            step = TrainStep(made(small.Classes, *args), sgd, Plan(DP2), batch)
            assert_same_gradients(step, made(small.Classes, *args), batch, lambda m: m(**batch))
            with pytest.raises(PlanError, match="reduction='mean' or 'sum'"):
                TrainStep(made(small.Classes, *args), sgd, Plan(DP2), batch, accumulate=2)
        model, plain = (made(small.Classes, "mean", False, 0.1) for _ in range(2))
        step = TrainStep(model, sgd, Plan(DP2), batch, accumulate=2, reduction="mean")
        assert_same_gradients(step, plain, batch, lambda m: m(**batch))  # all labels valid: exact
        with pytest.raises(PlanError, match="reduction"):
            TrainStep(made(small.Rows), sgd, Plan(DP2), X, reduction="max")

    on_ranks(2, check)


def test_accumulation_on_two_axes() -> None:
    """Shards in replicas, where one axis is reduced in every micro-batch; tp beside dp."""
    ids = integers(11, 8, 6)
    batch = {"ids": ids, "labels": ids}
    shards, tp = Layout((2, 2), ("dp", "fsdp")), Layout((2, 2), ("dp", "tp"))
    head = {"head.weight": tp("tp", None)}
    plans = [Plan(shards, fsdp="fsdp", zero=zero) for zero in (1, 2, 3)]
    plans += [
        Plan(tp, head),
        Plan(tp, head, fsdp="dp"),
        Plan(tp, activations={"embed": tp("dp", "tp", None)}),
    ]

    def check() -> None:
        for plan in plans:
            step = TrainStep(made(small.NextToken), sgd, plan, batch, accumulate=2)
            for rows in (8, 5):
                some = {name: x[:rows] for name, x in batch.items()}
                assert_same_gradients(step, made(small.NextToken), some, lambda m, b=some: m(**b)["loss"])

    on_ranks(4, check)


def test_accumulation_reduces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, biases' too, are summed over ranks once a step; a micro-batch sends its loss alone.

    What a program says that it sends is what it sends: of a mean, a sum and a count.
    """
    ids = integers(11, 8, 6)
    batch = {"ids": ids, "labels": ids}

    def check() -> tuple[list[int], int]:
        sent: list[int] = []

        def counted(x: Tensor, *rest: Any, **how: Any) -> Any:
            sent.append(x.numel())
            return collectives.all_reduce_start(x, *rest, **how)

        def counted_many(xs: list[Tensor], *rest: Any, **how: Any) -> Any:
            sent.extend(x.numel() for x in xs)
            return collectives.all_reduce_many_start(xs, *rest, **how)

        monkeypatch.setitem(FUNCTIONS, communication.all_reduce_start, counted)  # type: ignore[arg-type]
        monkeypatch.setitem(FUNCTIONS, communication.all_reduce_many_start, counted_many)  # type: ignore[arg-type]
        counts = []
        for accumulate in (1, 4):
            step = TrainStep(made(small.NextToken), sgd, Plan(DP2), batch, accumulate=accumulate)
            sent.clear()
            step.step(batch)
            counts.append(sum(sent))
            said = sum(t.num_bytes for t in step.program.compiled.program.transfers()) // 8
            # 11 elements in two pieces: the fuller one holds 6, so 12 are counted.
            assert said == (sum(sent) + 1 if accumulate == 1 else 2)
        return counts, sum(p.numel() for p in step.params.values())

    for counts, elements in on_ranks(2, check):
        assert counts == [elements + 2, elements + 4 * 2]


@pytest.mark.parametrize("where", ["finish", "norm"])
@pytest.mark.parametrize("door", ["step", "parts"])
def test_every_wait_for_others_is_communication(
    door: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes late to the sums of gradients that end an accumulation, or to that of the norm."""

    def run(rank: int) -> float:
        step: Any
        if door == "step":
            step = TrainStep(made(small.Rows), sgd, Plan(DP2), X, accumulate=2, clip=1.0)
            program, module = step.program, step_module
        else:
            parts = {"all": Part(["up", "down"], Plan(DP2))}
            step = PartsStep(made(small.Rows), sgd, parts, X, accumulate=2, clip=1.0)
            program, module = step.programs[0], parts_module
        step.step(X)
        owner, name = (program.finish.last, "run") if where == "finish" else (module, "clip_gradients")
        plain = getattr(owner, name)

        def late(*args: Any) -> Any:
            time.sleep(0.5 * rank)
            return plain(*args)

        monkeypatch.setattr(owner, name, late)
        waited: float = step.step(X).comm_seconds
        step.here = replace(step.here, device=torch.device("cuda"))
        assert math.isnan(step._waited())
        return waited

    assert run_ranks(2, run)[0] > 0.4


def test_masked_language_models_count_every_label() -> None:
    """BERT's labels are not shifted: the first position counts when micro-batches are weighed."""
    torch.manual_seed(0)
    ids = integers(families.VOCAB, 4, 12)
    labels = torch.full_like(ids, -100)
    labels[0, 0], labels[1, :4], labels[3, 0] = 5, 7, 9
    batch = {"input_ids": ids, "labels": labels}

    def make() -> nn.Module:
        torch.manual_seed(0)
        return families.bert(1)

    def check() -> float:
        step = TrainStep(make(), sgd, Plan(DP2), batch, accumulate=2)
        return step.step(batch).loss

    true = make()(**batch).loss.item()
    assert on_ranks(2, check) == pytest.approx([true] * 2, rel=1e-6)


def test_nested_batches_and_a_named_loss() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small.Nested()

        def forward(self, batch: Any, scale: float) -> dict[str, Any]:
            found = self.inner(batch)
            return {"parts": (found["hidden"].pow(2).mean() * scale, found["hidden"])}

    batch = {"batch": {"x": {"y": numbers(8, 4)}}, "scale": 3.0}

    def check() -> None:
        for accumulate in (1, 2):
            step = TrainStep(made(Mean), sgd, Plan(DP2), batch, loss="parts.0", accumulate=accumulate)
            plain = made(Mean)
            assert_same_gradients(step, plain, batch, lambda m: m(**batch)["parts"][0])

    on_ranks(2, check)


@pytest.mark.timeout(240)  # Inductor starts cold: C++ compilers on two busy cores
def test_compiled_regions_give_the_same_losses() -> None:
    if get_compile_threads() > 1:  # as after a compilation here: the ranks are forked with such a pool
        AsyncCompile.pool().submit(int).result()
    ids = integers(11, 4, 6)
    batch = {"ids": ids, "labels": ids}

    def losses(step: TrainStep) -> list[float]:
        return [step.step(batch).loss for _ in range(3)]

    def check() -> tuple[list[float], list[float]]:
        eager, compiled = (
            TrainStep(made(small.NextToken).float(), sgd, Plan(DP2), batch, compile=flag)
            for flag in (False, True)
        )
        return losses(eager), losses(compiled)

    for eager, compiled in on_ranks(2, check, timeout=220):
        assert compiled == pytest.approx(eager, rel=1e-5) and eager[2] < eager[0]


def test_misuse_has_one_clear_error() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"loss": y.pow(2).sum(1), "best": y.argmax()}

    nested = {"batch": {"x": {"y": X}}}
    wrong: list[tuple[type[Exception], str, type[nn.Module], Any, dict[str, Any]]] = [
        (CaptureError, "one result called loss", small.Nested, nested, {}),
        (CaptureError, "one of output", small.Rows, X, {"loss": "los"}),
        (PlanError, "one number", Vector, X, {}),
        (PlanError, "one number", Vector, X, {"loss": "best"}),
        (PlanError, "1 to the 5 rows", small.Rows, X, {"accumulate": 9}),
        (PlanError, "1 or more micro-batches", small.Rows, X, {"accumulate": 0}),
        (PlanError, "a norm above 0", small.Rows, X, {"clip": -1.0}),
        (PlanError, "clip: got '1'", small.Rows, X, {"clip": "1"}),
        (PlanError, "accumulate: got 2.5", small.Rows, X, {"accumulate": 2.5}),
        (PlanError, "accumulate: got True", small.Rows, X, {"accumulate": True}),
    ]

    def check() -> None:
        for kind, message, cls, batch, options in wrong:
            with pytest.raises(kind, match=message):
                TrainStep(made(cls), sgd, Plan(DP2), batch, **options)
        for make, words in ((None, "NoneType"), (lambda named: None, "a function that returns NoneType")):
            with pytest.raises(UserError, match=f"optimizer: got '?{words}'?; allowed: a function"):
                TrainStep(made(small.Rows), make, Plan(DP2), X)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="plan: got 'atuo'"):
            TrainStep(made(small.Rows), sgd, "atuo", X)  # type: ignore[arg-type]
        frozen = made(small.Rows).requires_grad_(False)
        with pytest.raises(PlanError, match="depends on a trained parameter"):
            TrainStep(frozen, sgd, Plan(DP2), X)

    on_ranks(2, check)


def test_batches_are_cut_by_rows_whatever_their_nesting() -> None:
    batch = (torch.arange(7), {"mask": [torch.ones(7, 2)], "scale": 2.0}, torch.ones(3))
    parts = split_batch(batch, 3)
    assert [p[0].tolist() for p in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [p[1]["mask"][0].shape[0] for p in parts] == [3, 2, 2]
    assert all(p[1]["scale"] == 2.0 and p[2].shape == (3,) for p in parts)
