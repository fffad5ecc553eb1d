"""Parameters of a parallelized model: frozen, tied, loaded, clipped, cut twice; and its misuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyperparallel.errors import CaptureError, LayoutError, PlanError, RunError, UserError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.parallel import parallelize
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
)
from tests.runtime.module.small import integers, made, numbers

pytestmark = pytest.mark.procs


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


def test_dtypes_may_change_and_a_foreign_autocast_is_refused() -> None:
    def check() -> None:
        model, plain = pair(small.NextToken, {"ids": integers(11, 4, 6), "labels": integers(11, 4, 6)})
        ids = integers(11, 4, 6)
        for module in (model, plain):
            module.float()
        for _ in range(2):
            with (
                torch.autocast("cpu", torch.bfloat16),
                pytest.raises(UserError, match='compute="bfloat16"'),
            ):
                model(ids, ids)
            assert_close(model(ids, ids)["loss"], plain(ids, ids)["loss"], 1e-6)

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
