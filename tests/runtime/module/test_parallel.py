"""`parallelize` in a plain training loop: the batches, results and habits that users have."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperparallel.errors import CaptureError, UserError
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.parallel import parallelize
from tests.graph.capture import families
from tests.runtime.module import small
from tests.runtime.module.dense import (
    DP2,
    TP2,
    X,
    assert_close,
    assert_same_grads,
    assert_same_step,
    on_ranks,
    pair,
    whole,
)
from tests.runtime.module.small import integers, made, numbers

pytestmark = pytest.mark.procs
NESTED = {"batch": {"x": {"y": X}}}


@pytest.mark.parametrize("batch", [(X,), [X], X, {"x": X}], ids=["tuple", "list", "tensor", "dict"])
def test_batches_of_any_kind(batch: Any) -> None:
    def check() -> None:
        model, plain = pair(small.Rows, batch)
        assert_same_step(model, plain, X)
        assert_close(model(x=X), plain(X))

    on_ranks(2, check)


def test_nested_batches_and_several_results() -> None:
    """Results are whole plain tensors, so that they mix with plain targets in any loss."""

    def check() -> None:
        target = numbers(5, 2)
        for plan in (
            Plan(DP2),
            Plan(DP2, fsdp="dp"),
            Plan(TP2, {"inner.weight": TP2("tp", None)}),
        ):
            model, plain = pair(small.Nested, NESTED, plan)
            got, true = model(**NESTED), plain(**NESTED)
            assert got["n"] == 3 and type(got["out"]) is tuple
            assert type(got["hidden"]) is Tensor
            assert_close(got["hidden"], true["hidden"])
            for found in (got, true):
                (F.mse_loss(found["out"][0], target) + 3 * found["out"][1]).backward()
            assert_same_grads(model, plain)
            # Only one of the results takes part: what depends on the others alone gets zeros.
            for found, module in ((model(**NESTED), model), (plain(**NESTED), plain)):
                module.zero_grad()
                found["hidden"].pow(2).sum().backward()
            assert_close(model.inner.weight.grad, plain.inner.weight.grad)
            assert not whole(model.outer.weight.grad).any()

    on_ranks(2, check)


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"loss": y.pow(2).mean(), "logits": y, "best": y.argmax(-1)}


def test_a_loss_made_of_other_results_is_refused_or_declared() -> None:
    def total(found: dict[str, Tensor]) -> Tensor:
        return found["loss"] + found["logits"].pow(3).sum()

    def check() -> None:
        model, plain = pair(WithLogits, X)
        found = model(X)
        assert_close(found["logits"], plain(X)["logits"])
        assert_close(found["best"], plain(X)["best"])
        with pytest.raises(UserError, match=r"grad_outputs=\['loss', 'logits'\]"):
            total(found).backward()
        model, plain = pair(WithLogits, X, grad_outputs=["loss", "logits"])
        total(model(X)).backward()
        total(plain(X)).backward()
        assert_same_grads(model, plain)
        with pytest.raises(CaptureError, match="one of loss, logits"):
            parallelize(made(WithLogits), Plan(DP2), X, grad_outputs=["los"])

    on_ranks(2, check)


def test_buffers_follow_the_whole_batch_and_evaluation_leaves_them() -> None:
    def check() -> None:
        model, plain = pair(small.Batch, X)
        for factor in (1.0, 2.0, 3.0):
            model.zero_grad()
            plain.zero_grad()
            assert_same_step(model, plain, X * factor)
        model.norm.eval()
        plain.norm.eval()
        assert_close(model(X), plain(X))  # one part in evaluation mode, the rest in training
        model.eval()
        plain.eval()
        with torch.no_grad():
            assert_close(model(X), plain(X))
        for got, true in zip(model.buffers(), plain.buffers(), strict=True):
            assert_close(got, true)
            assert not got.requires_grad and got.grad_fn is None

    on_ranks(2, check)


class Slices(nn.Module):
    """Slices that end past the end, before it, or where they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        parts = (y[:, :100], y[2:50], y[:, -2:], y[1:-1], y[:, 3:3], y[-100:, ::4], y[:, -9:2])
        return sum((part.exp().sum() for part in parts), y.new_zeros(()))


@pytest.mark.parametrize("mesh", [DP2, TP2])
def test_slices_may_reach_past_the_end(mesh: Any) -> None:
    def check() -> None:
        model, plain = pair(Slices, X, Plan(mesh))
        assert_same_step(model, plain, X)

    on_ranks(2, check)


class Masked(nn.Module):
    """What is made of a buffer alone is kept from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mask", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.mask.exp()
        return out


def test_a_buffer_in_the_place_of_one_that_was_freed_is_seen() -> None:
    """Python gives a new tensor the id of one that was freed just before, and both have version 0."""
    x = numbers(5, 4)
    model, plain = parallelize(made(Masked), Plan(Layout((1,), ("dp",))), x), made(Masked)
    for number in range(20):
        for module in (model, plain):
            module.mask = None
            module.mask = torch.full((3,), float(number), dtype=x.dtype)
        assert_close(model(x), plain(x))


def test_modes_gradients_and_random_numbers() -> None:
    def check() -> None:
        model, plain = pair(small.Dropped, X)
        losses = []
        for module in (model, plain):
            torch.manual_seed(5)
            losses.append([module(X), module(X)])
            with torch.no_grad():
                losses[-1].append(module(X))
        for got, true in zip(*losses, strict=True):
            assert_close(got, true)
        assert losses[0][0] != losses[0][1] and not losses[0][2].requires_grad
        model.eval()
        plain.eval()
        with torch.no_grad():
            assert_close(model(X), plain(X))
        with torch.inference_mode():
            assert_close(model(X), plain(X))
        assert_same_step(model, plain, X)  # gradients in evaluation mode

    on_ranks(2, check)


def test_other_shapes_later() -> None:
    """A smaller last batch, one row, no row, other lengths; the weights keep their layouts."""

    def check() -> None:
        example = numbers(4, 5, 8)
        model, plain = pair(small.Constants, example, Plan(DP2, fsdp="dp"))
        for shape in ((4, 5, 8), (3, 5, 8), (1, 5, 8), (4, 7, 8), (4, 6, 8)):
            model.zero_grad()
            plain.zero_grad()
            assert_same_step(model, plain, numbers(*shape, seed=7))
        rows, same = pair(small.Rows, X)
        rows(X[:0]).backward()
        same(X[:0]).backward()
        assert_same_grads(rows, same)

    on_ranks(2, check)


def test_a_call_may_lack_inputs_and_take_another_way() -> None:
    labels = torch.tensor([0, 1, 1, 0, 1])

    def check() -> None:
        plan = Plan(DP2, inputs={"labels": DP2("dp")}, fsdp="dp")
        model, plain = pair(small.TwoHeads, {"x": X, "labels": labels}, plan)
        for call in ({"labels": labels}, {}, {"head": "b"}, {"labels": labels, "head": "b"}):
            got, true = model(X, **call), plain(X, **call)
            assert got.keys() == true.keys()
            assert_close(got["logits"], true["logits"])
            for found, module in ((got, model), (true, plain)):
                module.zero_grad()
                found.get("loss", found["logits"].sum()).backward()
            assert_close(model.body.weight.grad, plain.body.weight.grad)
        assert_close(model(X, None, "b")["logits"], plain(X, head="b")["logits"])

    on_ranks(2, check)


def test_accumulated_backwards_in_any_order() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X)
        for module in (model, plain):
            one, two = module(X), module(2 * X)
            (one + two).backward()
            for factor in range(3):
                module(X * factor).backward()
        assert_same_grads(model, plain)

    on_ranks(2, check)


def test_gradients_of_inputs() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X)
        one, two = (X.clone().requires_grad_() for _ in range(2))
        model(one).backward()
        plain(two).backward()
        assert one.grad is not None and two.grad is not None
        assert_close(one.grad, two.grad)

    on_ranks(2, check)


def test_activation_checkpointing_draws_the_same_numbers() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(lambda z: torch.relu(self.drop(self.linear(z))), x, use_reentrant=False)
            return y.pow(2).sum()

    def check() -> None:
        model, plain = pair(Checkpointed, X)
        losses = []
        for module in (model, plain):
            torch.manual_seed(3)
            losses.append(module(X))
            losses[-1].backward()
        assert_close(*losses)
        assert_same_grads(model, plain)

    on_ranks(2, check)


def test_a_hugging_face_loop_with_dropout_and_evaluation() -> None:
    """GPT-2, AdamW on DTensors, dropout 0.1: its float32 loss agrees to 1e-6 after each update."""
    ids = integers(families.VOCAB, 4, 12)

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        found = []
        for rows in (4, 4, 3):
            loss = model(input_ids=ids[:rows], labels=ids[:rows]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        model.eval()
        with torch.no_grad():
            out = model(input_ids=ids, output_hidden_states=True)
        assert len(out.hidden_states) == 3 and type(out.logits) is Tensor
        return [*found, out.logits.double().pow(2).mean().item()]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return families.gpt2(2, 0.1).double().train()

    def check() -> list[float]:
        mesh = Layout((2, 2), ("dp", "tp"))
        plan = Plan(mesh, {"*.c_fc.weight": mesh(None, "tp")}, fsdp="dp")
        return losses(parallelize(make(), plan, {"input_ids": ids, "labels": ids}))

    true = losses(make())
    for found in on_ranks(4, check):
        assert found == pytest.approx(true, rel=1e-6)


def test_a_backward_frees_what_was_saved_as_it_goes() -> None:
    """Else gradients would come on top of all activations, instead of in their place."""

    def check() -> None:
        torch.manual_seed(0)
        deep = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())]).double()
        model = parallelize(deep, Plan(DP2), numbers(4, 16))
        alive: list[int] = []
        loss = model(numbers(4, 16)).sum()
        node = loss.grad_fn
        while not hasattr(node, "saved"):
            node = node.next_functions[0][0]
        watched = [weakref.ref(x) for x in node.saved if not isinstance(x, nn.Parameter)]
        parameters = {p._local_tensor.data_ptr() for p in model.parameters()}
        watched = [w for w in watched if w().data_ptr() not in parameters]
        compiled = node.step.compiled
        with compiled.marked("backward", lambda: alive.append(sum(w() is not None for w in watched))):
            loss.backward()
        assert alive[0] == len(watched) >= 8
        assert alive[len(alive) // 2] <= 0.7 * len(watched) and alive[-1] <= 1

    on_ranks(2, check)
