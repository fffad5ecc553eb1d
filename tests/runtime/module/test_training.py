"""Sharded training equals the single-device run, step by step, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyperparallel.layout import Layout
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.runtime.module.step import TrainStep
from tests.graph.capture import families
from tests.models import plain_decoder, token_batches
from tests.ranks import run_ranks
from tests.shared_builds import shared_builds

pytestmark = pytest.mark.procs
DECLARED = ("*.o.weight", "*.down.weight")


def plan_of(name: str) -> Plan:
    """The layouts that the issue names; two weights of a block are declared, the rest follows."""
    shape, names = {
        "dp4": ((4,), ("dp",)),
        "tp4": ((4,), ("tp",)),
        "dp2 x tp2": ((2, 2), ("dp", "tp")),
        "fsdp4": ((4,), ("fsdp",)),
        "fsdp2 x tp2, sequence cut": ((2, 2), ("fsdp", "tp")),
        "uneven dp3": ((3,), ("dp",)),
        "uneven fsdp3": ((3,), ("fsdp",)),
        "zero1": ((4,), ("fsdp",)),
    }[name]
    mesh = Layout(shape, names)
    params = {p: mesh(None, "tp") for p in DECLARED} if "tp" in names else {}
    fsdp = "fsdp" if "fsdp" in names else None
    activations = {"blocks.*": mesh("fsdp", "tp", None)} if "sequence" in name else {}
    return Plan(mesh, params, activations=activations, fsdp=fsdp, zero=1 if name == "zero1" else 3)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


def dense_losses(steps: int, dtype: torch.dtype, clip: float = 1.0) -> list[float]:
    model = plain_decoder(dtype)
    optimizer = adamw(model.parameters())
    losses = []
    for ids in token_batches(steps):
        loss = model(ids)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(name: str, dtype: torch.dtype, **more: Any) -> TrainStep:
    return TrainStep(plain_decoder(dtype), adamw, plan_of(name), token_batches(1)[0], clip=1.0, **more)


def sharded_losses(name: str, steps: int, dtype: torch.dtype, **more: Any) -> list[float]:
    step = sharded(name, dtype, **more)
    return [step.step(ids).loss for ids in token_batches(steps)]


def largest_difference(got: list[float], true: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, true, strict=True))


FOUR = ("dp4", "tp4", "dp2 x tp2", "fsdp4", "fsdp2 x tp2, sequence cut")


@pytest.mark.timeout(300)
def test_fifty_steps_on_four_ranks_equal_one_device() -> None:
    def rank_main(rank: int) -> dict[str, list[float]]:
        return {name: sharded_losses(name, 50, torch.float32) for name in FOUR}

    true = dense_losses(50, torch.float32)
    assert true[-1] < true[0]
    with shared_builds(4, lambda here: [sharded(name, torch.float32, here=here) for name in FOUR]):
        rows = run_ranks(4, rank_main, timeout=240)
    for losses in rows:
        for name in FOUR:
            assert largest_difference(losses[name], true) < 1e-5, name


@pytest.mark.timeout(300)
def test_float64_agrees_to_ten_digits() -> None:
    """Also with accumulated micro-batches, whose gradients are reduced once or per micro-batch."""

    runs = [(name, 1) for name in FOUR] + [(name, 2) for name in ("dp4", "zero1", "fsdp4")]

    def rank_main(rank: int) -> dict[Any, list[float]]:
        return {(n, parts): sharded_losses(n, 50, torch.float64, accumulate=parts) for n, parts in runs}

    def rehearse(here: Here) -> None:
        for name, parts in runs:
            sharded(name, torch.float64, accumulate=parts, here=here)

    true = dense_losses(50, torch.float64)
    with shared_builds(4, rehearse):
        rows = run_ranks(4, rank_main, timeout=240)
    for losses in rows:
        for name, got in losses.items():
            assert largest_difference(got, true) < 1e-10, name


@pytest.mark.timeout(300)
def test_three_ranks_and_four_rows() -> None:
    names = ("uneven dp3", "uneven fsdp3")

    def rank_main(rank: int) -> dict[str, list[float]]:
        return {name: sharded_losses(name, 50, torch.float32) for name in names}

    true = dense_losses(50, torch.float32)
    for losses in run_ranks(3, rank_main, timeout=240):
        for name in names:
            assert largest_difference(losses[name], true) < 1e-5, name


FAMILIES = {
    "llama": (families.llama, families.tokens, ("*.q_proj.weight", "*.gate_proj.weight")),
    "qwen3": (families.qwen3, families.tokens, ("*.q_proj.weight", "*.gate_proj.weight")),
    "mistral": (families.mistral, families.tokens, ("*.q_proj.weight", "*.gate_proj.weight")),
    "gemma": (families.gemma, families.tokens, ("*.q_proj.weight", "*.gate_proj.weight")),
    "gpt2": (lambda n: families.gpt2(n, 0.1), families.tokens, ("*.mlp.c_proj.weight",)),
    "bert": (lambda n: families.bert(n, 0.1), families.masked, ("*.intermediate.dense.weight",)),
    "vit": (families.vit, families.images, ("*.fc1.weight",)),
}


def family(name: str) -> tuple[nn.Module, Any]:
    """A Hugging Face model and its batch."""
    make, batch, _ = FAMILIES[name]
    torch.manual_seed(0)
    return make(2).train(), batch()


def parallel_family(name: str, **more: Any) -> nn.Module:
    mesh, (model, example) = Layout((2, 2), ("dp", "tp")), family(name)
    plan = Plan(mesh, {declared: mesh("tp", None) for declared in FAMILIES[name][2]})
    return parallelize(model, plan, example, **more)


def family_losses(model: nn.Module, example: Any) -> list[float]:
    """Five steps in a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(7)
    for _ in range(5):
        loss = model(**example).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAMILIES)
def test_model_families_train_on_four_ranks(name: str) -> None:
    """dp2 x tp2 from a declared layout or two; dropout masks are those of one device."""
    model, example = family(name)
    true = family_losses(model, example)

    def rank_main(rank: int) -> list[float]:
        return family_losses(parallel_family(name), example)

    with shared_builds(4, lambda here: parallel_family(name, here=here)):
        rows = run_ranks(4, rank_main, timeout=240)
    for losses in rows:
        assert largest_difference(losses, true) < 1e-5
