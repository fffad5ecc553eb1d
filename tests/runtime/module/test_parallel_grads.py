"""Gradients of a parallelized model: put where autograd puts them, seen by whoever wants to see them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.plan import Plan
from hyperparallel.runtime.module.fast_path import gradients
from hyperparallel.runtime.module.parallel import ParallelState
from tests.runtime.module import small
from tests.runtime.module.dense import (
    DP2,
    X,
    assert_close,
    assert_same_grads,
    assert_same_step,
    on_ranks,
    pair,
    whole,
)
from tests.runtime.module.small import made

pytestmark = pytest.mark.procs
FSDP = Plan(DP2, fsdp="dp")


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation_and_both_ways_to_zero(to_none: bool) -> None:
    """Over several backward calls and steps; zeroed gradients stay the same objects."""

    def check() -> None:
        model, plain = pair(small.Rows, X, FSDP)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]
        for factor in range(1, 4):
            before = [p.grad for p in model.parameters()]
            for module in (model, plain):
                module(X * factor).backward()
                module(X + factor).backward()
            assert_same_grads(model, plain)
            if factor > 1 and not to_none:
                pairs = zip(before, model.parameters(), strict=True)
                assert all(old is p.grad for old, p in pairs)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            with torch.no_grad():  # the next forward sees the update, also in evaluation
                assert_close(model(X), plain(X))

    on_ranks(2, check)


def test_gradients_are_as_if_the_engine_had_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def grads(by_engine: bool) -> list[DTensor]:
        with monkeypatch.context() as patch:
            if by_engine:
                patch.setattr(gradients, "_is_plain", lambda *_: False)
            model, _ = pair(small.Rows, X, FSDP)
            model(X).backward()
            model(X).backward()
        return [p.grad for p in model.parameters()]

    def check() -> None:
        for one, two in zip(grads(False), grads(True), strict=True):
            assert type(one) is type(two) is DTensor and one._spec == two._spec
            assert torch.equal(one.to_local(), two.to_local()) and not one.requires_grad
            assert one.is_leaf and one.shape == two.shape and one.stride() == two.stride()

    on_ranks(2, check)


def test_hooks_see_gradients() -> None:
    """On tensors, after accumulation, on several tensors, on the node that accumulates."""

    def check() -> None:
        model, plain = pair(small.Rows, X, FSDP)
        seen: list[list[Any]] = []
        for module in (model, plain):
            found: list[Any] = []
            seen.append(found)
            module.up.weight.register_hook(lambda grad: 2 * grad)
            module.up.bias.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad))
            node = torch.autograd.graph.get_gradient_edge(module.down.weight).node
            node.register_hook(lambda _, given, found=found: found.append(given[0]))
            both = [module.down.bias, module.up.bias]
            handle = torch.autograd.graph.register_multi_grad_hook(both, found.extend)
            module(X).backward()
            del node
            handle.remove()
        assert_same_grads(model, plain)
        assert len(seen[0]) == len(seen[1]) == 4
        by_norm = [sorted((whole(x) for x in found), key=lambda x: float(x.norm())) for found in seen]
        for one, two in zip(*by_norm, strict=True):
            assert_close(one, two)

    on_ranks(2, check)


def test_gradients_that_are_asked_for() -> None:
    """`torch.autograd.grad` returns them and leaves `.grad` alone; `inputs` restricts where they go."""

    def check() -> None:
        model, plain = pair(small.Rows, X, FSDP)
        got, true = (torch.autograd.grad(m(X), [m.up.weight, m.down.bias]) for m in (model, plain))
        for one, two in zip(got, true, strict=True):
            assert isinstance(one, DTensor)
            assert_close(one, two)
        assert all(p.grad is None for p in model.parameters())
        for module in (model, plain):
            module(X).backward(inputs=[module.up.weight])
        assert_same_grads(model, plain)
        for module in (model, plain):
            loss = module(X)
            module.up.weight.requires_grad_(False)
            loss.backward()
            module.up.weight.requires_grad_(True)
        assert_same_grads(model, plain)

    on_ranks(2, check)


def test_a_parameter_may_be_used_outside_the_model_too() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X, FSDP)
        for module in (model, plain):
            for _ in range(2):
                decay = module.up.weight.pow(2).sum()
                if isinstance(decay, DTensor):
                    decay = decay.full_tensor()
                (module(X) + 3 * decay + module(2 * X)).backward()
        assert_same_grads(model, plain)

    on_ranks(2, check)


def test_updates_in_place_and_loaded_weights_are_seen() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X, FSDP)
        for module in (model, plain):
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(0.5)
                module.up.weight.data.add_(1.0)
        assert_same_step(model, plain, X)
        model.load_state_dict(made(small.Rows).state_dict())
        plain.load_state_dict(made(small.Rows).state_dict())
        for module in (model, plain):
            module.zero_grad()
            module.float()
        assert model(X.float()).dtype == torch.float32
        assert_close(model(X.float()), plain(X.float()), 1e-5)

    on_ranks(2, check)


class Returning(nn.Module):
    """Hands out a parameter, a constant and one result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x).exp()
        return {"a": y, "b": y, "bias": self.linear.bias, "x": x, "three": torch.full((2,), 3.0)}


def test_results_that_are_not_the_programs_own() -> None:
    def check() -> None:
        model, plain = pair(Returning, X)
        for _ in range(2):
            got, true = model(X), plain(X)
            for key in true:
                assert_close(got[key].double(), true[key].double())
            for found, module in ((got, model), (true, plain)):
                module.zero_grad()
                (found["a"].sum() + 2 * found["b"].sum() + found["bias"].pow(2).sum()).backward()
                found["three"].mul_(0)  # the caller's to change
            assert_same_grads(model, plain)
            bias = model.linear.bias
            assert bias.is_leaf and bias._local_tensor.grad_fn is None

    on_ranks(2, check)


def test_what_a_forward_keeps_is_freed_without_a_backward() -> None:
    def check() -> None:
        model, _ = pair(Returning, X)
        gc.collect()
        gc.disable()
        try:
            kept = weakref.ref(model(X)["a"])
            assert kept() is None
        finally:
            gc.enable()

    on_ranks(2, check)


def test_one_program_for_every_spelling_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And arguments go to their places, whatever the order in which keywords are given."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, z: Tensor | None = None) -> Tensor:
            found = self.linear(x) - scale * y
            loss: Tensor = (found if z is None else found * z).pow(2).sum()
            return loss

    def check() -> None:
        model, plain = pair(Weighted, {"x": X, "y": 2 * X})
        builds: list[Any] = []
        monkeypatch.setattr(ParallelState, "make", lambda *_, **__: builds.append(1))
        for args, kwargs in (
            ((X, 2 * X), {}),
            ((X,), {"y": 3 * X}),
            ((), {"y": X, "x": 2 * X}),
            ((X, X), {"z": None}),
            ((X, 3 * X), {"z": None}),
        ):
            assert_close(model(*args, **kwargs), plain(*args, **kwargs))
        assert not builds
        monkeypatch.undo()
        assert_close(model(X, X, 2.0), plain(X, X, 2.0))
        assert_close(model(X, X, True), plain(X, X, True))
        assert_close(model(z=X, y=2 * X, x=3 * X), plain(z=X, y=2 * X, x=3 * X))

    on_ranks(2, check)


def test_a_replaced_submodule_is_noticed() -> None:
    def check() -> None:
        model, plain = pair(small.Rows, X, FSDP)
        assert_same_step(model, plain, X)
        held = model.down
        other, _ = pair(small.Rows, X, FSDP)
        with torch.no_grad():
            other.down.weight.mul_(2)
            plain.down.weight.mul_(2)
        model.down = other.down
        assert_close(model(X), plain(X))
        model.down = held
        with torch.no_grad():
            plain.down.weight.mul_(0.5)
        assert_close(model(X), plain(X))

    on_ranks(2, check)
