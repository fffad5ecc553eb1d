"""`parallelize` in a plain training loop: the batches, modules and habits that users have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.errors import CaptureError, LayoutError, PlanError, RunError, UserError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.parallel import parallelize
from tests.graph import families
from tests.ranks import run_ranks
from tests.runtime import small
from tests.runtime.small import integers, made, numbers

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]
DP2, TP2 = Layout((2,), ("dp",)), Layout((2,), ("tp",))
X = numbers(5, 4)
NESTED = {"batch": {"x": {"y": X}}}


def on_ranks(n: int, check: Callable[[], Any]) -> list[Any]:
    return run_ranks(n, lambda rank: check(), timeout=110)


def pair(cls: type[nn.Module], batch: Any, plan: Plan | None = None, **more: Any) -> Any:
    """The same module parallelized and plain."""
    return parallelize(made(cls), plan or Plan(DP2), batch, **more), made(cls)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_close(got: Tensor, true: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(whole(got), true, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_grads(model: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    got = {name: p.grad for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        found = got.pop(name)
        assert (found is None) == (p.grad is None), name
        if found is not None and p.grad is not None:
            assert_close(found, p.grad, tolerance)
    assert not got


def assert_same_step(model: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Forward and backward of a scalar loss."""
    got, true = model(*args, **kwargs), plain(*args, **kwargs)
    assert_close(got, true)
    got.backward()
    true.backward()
    assert_same_grads(model, plain)


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


def test_freezing_and_unfreezing_later() -> None:
    def check() -> None:
        model, plain = made(small.Rows), made(small.Rows)
        for module in (model, plain):
            module.up.requires_grad_(False)
        model = parallelize(model, Plan(DP2, fsdp="dp"), X)
        for flag in (False, True, False):
            for module in (model, plain):
                module.zero_grad()
                module.up.requires_grad_(flag)
            assert_same_step(model, plain, X)
        for module in (model, plain):
            module.requires_grad_(False)
        assert_close(model(X), plain(X))

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


def test_adapters_are_trained_and_frozen_weights_not() -> None:
    def check() -> None:
        x = numbers(5, 8)
        model, plain = pair(small.Lora, x, Plan(DP2, fsdp="dp"))
        assert_same_step(model, plain, x)
        assert sum(p.grad is not None for p in model.parameters()) == 8

    on_ranks(2, check)


def test_tied_weights_are_one_parameter() -> None:
    """7 rows on 2 and 3 ranks: every row is trained, and the optimizer sees the weight once."""

    def check() -> None:
        for axes in ({"fsdp": "dp"}, {}):
            mesh = Layout((3,), ("dp",))
            model, plain = pair(small.Tied, torch.arange(7), Plan(mesh, **axes))
            assert list(model.state_dict()) == list(plain.state_dict())
            assert len(list(model.parameters())) == 1 and model.head.weight is model.embed.weight
            for module in (model, plain):
                optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
                module(torch.arange(7)).backward()
                optimizer.step()
            assert_close(model.head.weight, plain.head.weight)
            assert (plain.head.weight != made(small.Tied).head.weight).any(dim=1).all()

    on_ranks(3, check)


def test_the_model_object_is_kept() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X, Plan(DP2, fsdp="dp"))
        assert isinstance(model, small.Rows) and list(model.state_dict()) == list(plain.state_dict())
        called = []
        model.register_forward_hook(lambda *_: called.append("model"))
        model.up.weight.register_hook(lambda grad: called.append(type(grad).__name__))
        model(X).backward()
        assert called == ["model", "DTensor"]

    on_ranks(2, check)


def test_whole_weights_load_and_copies_are_apart() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X, Plan(DP2, fsdp="dp"))
        average = copy.deepcopy(model)
        torch.manual_seed(9)
        other = small.Rows().double()
        model.load_state_dict(other.state_dict())
        assert_close(model(X), other(X))
        assert_close(average(X), plain(X))

    on_ranks(2, check)


def test_a_model_without_memory_is_filled_later() -> None:
    def check() -> None:
        with torch.device("meta"):
            model: nn.Module = small.Rows().double()
        model = parallelize(model, Plan(DP2, fsdp="dp"), X)
        assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
        model.load_state_dict(made(small.Rows).state_dict())
        assert_same_step(model, made(small.Rows), X)

    on_ranks(2, check)


def test_clipping_counts_every_gradient_once() -> None:
    """torch's own clip_grad_norm_, also where gradients share memory in the backward."""

    def check() -> None:
        for cls in (small.Rows, small.Shared):
            for plan in (Plan(DP2), Plan(DP2, fsdp="dp")):
                model, plain = pair(cls, X, plan)
                assert_same_step(model, plain, X)
                norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, plain)]
                assert_close(norms[0], norms[1])
                assert_same_grads(model, plain)
                assert_same_step(model, plain, X)

    on_ranks(2, check)


def test_dtypes_may_change_and_autocast_is_another_program() -> None:
    def check() -> None:
        model, plain = pair(small.NextToken, {"ids": integers(11, 4, 6), "labels": integers(11, 4, 6)})
        ids = integers(11, 4, 6)
        for module in (model, plain):
            module.float()
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert_close(model(ids, ids)["loss"], plain(ids, ids)["loss"], 1e-2)
                low = model(ids, ids)["loss"].item()
            assert_close(model(ids, ids)["loss"], plain(ids, ids)["loss"], 1e-6)
            assert low != model(ids, ids)["loss"].item()

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


def test_two_axes_and_biases() -> None:
    """fsdp beside tp on one bias, in either order of the mesh; more ranks than key/value heads."""

    def check() -> None:
        for names in (("dp", "tp"), ("tp", "dp")):
            mesh = Layout((2, 2), names)
            params = {"up.weight": mesh("tp", None), "down.weight": mesh(None, "tp")}
            model, plain = pair(small.Rows, X, Plan(mesh, params, fsdp="dp"))
            assert_same_step(model, plain, X)
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, plain)]
            assert_close(norms[0], norms[1])
        mesh, x = Layout((4,), ("tp",)), numbers(2, 5, 32)
        model, plain = pair(small.Grouped, x, Plan(mesh, {"q.weight": mesh("tp", None)}))
        assert model.k.weight.shape == plain.k.weight.shape
        assert model.q.weight.to_local().shape[0] == 8 and model.k.weight.to_local().shape[0] == 4
        assert_same_step(model, plain, x)

    on_ranks(4, check)


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


def test_misuse_has_one_clear_error() -> None:
    mesh4 = Layout((4,), ("dp",))
    swapped = Mesh((2,), ("dp",), (1, 0))
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (UserError, "torch.nn.Module", lambda: parallelize(torch.relu, Plan(DP2), X)),  # type: ignore[arg-type]
        (PlanError, "a Plan", lambda: parallelize(made(small.Rows), None, X)),  # type: ignore[arg-type]
        (PlanError, "the job's 2 ranks", lambda: parallelize(made(small.Rows), Plan(mesh4), X)),
        (LayoutError, "ascend", lambda: parallelize(made(small.Rows), Plan(swapped), X)),
        (UserError, "missing a required", lambda: parallelize(made(small.Rows), Plan(DP2), {})),
        (CaptureError, "must be Tensor", lambda: parallelize(made(small.Rows), Plan(DP2), None)),
        (
            PlanError,
            "nearest: up.weight",
            lambda: parallelize(made(small.Rows), Plan(TP2, {"upp.weight": TP2("tp", None)}), X),
        ),
        (
            LayoutError,
            "1 entries",
            lambda: parallelize(made(small.Rows), Plan(TP2, {"up.bias": TP2("tp", None)}), X),
        ),
    ]

    def check() -> None:
        for kind, message, call in wrong:
            with pytest.raises(kind, match=message):
                call()

    on_ranks(2, check)


def test_misuse_of_a_parallelized_model() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X)
        with pytest.raises(UserError, match="not parallelized yet"):
            parallelize(model, Plan(DP2), X)
        for kind, message, args, kwargs in (
            (UserError, "missing a required", (), {"y": X}),
            (UserError, "too many positional", (X, X), {}),
            (CaptureError, "self.up", (X[:, :3],), {}),
            (UserError, "batch.x: got 'object'", (object(),), {}),
        ):
            with pytest.raises(kind, match=message):
                model(*args, **kwargs)
        loss = model(X)
        loss.backward(retain_graph=True)
        with pytest.raises(RunError, match="backward through a parallelized model twice"):
            loss.backward()
        loss = model(X)
        with torch.no_grad():
            model.down.weight.mul_(2)
        with pytest.raises(RunError, match="changed in place between forward and backward"):
            loss.backward()
        with torch.no_grad():
            plain.down.weight.mul_(2)
        model.zero_grad()
        assert_same_step(model, plain, X)  # and works on
        model.up.weight = nn.Parameter(torch.zeros(6, 4))
        with pytest.raises(UserError, match=r"parameter up\.weight: got 'a plain tensor'"):
            model(X)

    on_ranks(2, check)


def test_alone_without_a_process_group() -> None:
    mesh = Layout((1,), ("dp",))
    model, plain = pair(small.Rows, X, Plan(mesh, {"up.weight": mesh("dp", None)}, fsdp="dp"))
    assert_same_step(model, plain, X)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, plain)]
    assert_close(norms[0], norms[1])
    for module in (model, plain):
        torch.optim.AdamW(module.parameters()).step()
    for name, x in model.state_dict().items():
        assert_close(x, plain.state_dict()[name])
    with pytest.raises(PlanError, match="the job's 1 ranks"):
        parallelize(made(small.Rows), Plan(DP2), X)
