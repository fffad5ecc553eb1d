"""TrainStep and parallelize on one to all devices equal the plain module on one device of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperparallel.graph.capture.precision import computing
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.job.session import Session
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.runtime.module.step import TrainStep
from hyperparallel.train.steps import ShardedStep
from tests.gpu.places import Place, places
from tests.models import plain_decoder, token_batches

STEPS = 4
DECLARED = ("*.o.weight", "*.down.weight")
LIMITS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-3}
"""Largest relative difference of a loss from the dense run's: sums go in another order, and in 16 bits
products are rounded elsewhere."""


def plans(n: int, compute: str | None = None) -> dict[str, Plan]:
    """The layouts that n ranks can have of a model with 4 heads and batches of 4 rows."""
    dp, fsdp, tp = (Layout((n,), (name,)) for name in ("dp", "fsdp", "tp"))
    found = {"dp": Plan(dp, compute=compute), "fsdp": Plan(fsdp, fsdp="fsdp", compute=compute)}
    if n <= 4:
        found["tp"] = Plan(tp, {name: tp(None, "tp") for name in DECLARED}, compute=compute)
    if n % 2 == 0:
        both = Layout((n // 2, 2), ("fsdp", "tp"))
        params = {name: both(None, "tp") for name in DECLARED}
        cut = {"blocks.*": both("fsdp", "tp", None)}
        found["fsdp x tp2, sequence cut"] = Plan(both, params, activations=cut, fsdp="fsdp", compute=compute)
    return found


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


def dense_losses(device: torch.device, dtype: torch.dtype, compute: str | None = None) -> list[float]:
    model = plain_decoder(dtype).to(device)
    optimizer = adamw(model.parameters())
    losses = []
    for ids in token_batches(STEPS):
        with computing(compute, device.type):
            loss = model(ids.to(device))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(plan: Plan, dtype: torch.dtype, **more: Any) -> TrainStep:
    return TrainStep(plain_decoder(dtype), adamw, plan, token_batches(1)[0], clip=1.0, **more)


def step_losses(step: TrainStep) -> list[float]:
    return [step.step(ids).loss for ids in token_batches(STEPS)]


def module_losses(plan: Plan, dtype: torch.dtype) -> list[float]:
    """By a plain loop around `parallelize`; batches come from the host, as a loader gives them."""
    model = parallelize(plain_decoder(dtype), plan, token_batches(1)[0])
    optimizer = adamw(model.parameters())
    losses = []
    for ids in token_batches(STEPS):
        loss = model(ids)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worst(got: list[float], true: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, true, strict=True))


def trained(session: Session, compute: str, compile: bool) -> dict[str, float]:
    """The worst step of every plan and front door."""
    mixed = compute if compute == "bfloat16" else None
    dtype = torch.float32 if mixed else getattr(torch, compute)
    true = dense_losses(session.device, dtype, mixed)
    found = {}
    for name, plan in plans(session.world_size, mixed).items():
        step = made(plan, dtype, compile=compile)
        assert all(p.device == session.device for p in step.params.values())
        found[name] = worst(step_losses(step), true)
        if not compile:
            found[f"{name}, module"] = worst(module_losses(plan, dtype), true)
    return found


@places(2)
@pytest.mark.parametrize("compute", ["float64", "bfloat16"])
def test_losses_are_those_of_one_device(place: Place, compute: str) -> None:
    for found in place.run(trained, compute, False):
        assert all(error < LIMITS[compute] for error in found.values()), found


@places()  # on CPU: runtime/module/test_step.py, where C++ compilers take half a minute
def test_compiled_losses_are_those_of_one_device(place: Place) -> None:
    for found in place.run(trained, "float32", True):
        assert all(error < LIMITS["float32"] for error in found.values()), found


class Replayed:
    """A function of tensors that stay where they are, captured as a CUDA graph; on the CPU it runs again."""

    def __init__(self, fn: Callable[[], list[Tensor]], device: torch.device) -> None:
        self.fn, self.graph = fn, None
        if device.type == "cpu":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events from a thread of its own, which a stricter mode forbids.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = fn()

    def __call__(self) -> list[Tensor]:
        if self.graph is None:
            return self.fn()
        self.graph.replay()
        return self.results


def graphed(session: Session) -> float:
    """The largest difference of a rank's captured program from the same program run eagerly."""
    largest = 0.0
    for plan in plans(session.world_size).values():
        step = made(plan, torch.float32)
        ids = token_batches(1)[0].to(session.device)
        program, leaves = step._program(ids)

        def run(program: Any = program, leaves: Any = leaves, step: TrainStep = step) -> list[Tensor]:
            loss, grads = program.run(leaves, step.params, step._buffers(program))
            return [loss, *grads]

        replayed = Replayed(run, session.device)
        for other in token_batches(3):  # the graph reads its batch and weights where they were
            ids.copy_(other)
            for parameter in step.params.values():
                parameter.data.mul_(0.9)
            got = [x.clone() for x in replayed()]
            for a, b in zip(got, run(), strict=True):
                largest = max(largest, float((a - b).abs().max()) if a.numel() else 0.0)
    return largest


@places(2)
def test_captured_programs_replay(place: Place) -> None:
    # The same kernels; atomic additions (the gradient of an embedding) may come in another order.
    assert max(place.run(graphed)) < 1e-6


def resumed(session: Session, folder: Path) -> tuple[list[float], list[float], set[str]]:
    """Losses of a run that goes on, of one that was loaded in its middle, and where loaded tensors are."""
    plan = plans(session.world_size)["fsdp"]
    batches = token_batches(STEPS)
    with Checkpointer(folder, rank=session.rank, world=session.world_size) as keeper:
        step = made(plan, torch.float32)
        sharded = ShardedStep(step)
        sharded.set_lr(0.003)  # another rate than the one below is made with: it comes from the checkpoint
        for ids in batches[:2]:
            step.step(ids)
        keeper.save(2, sharded.state(), {"optimizer": sharded.facts()}, sharded.aliases())
        whole = [step.step(ids).loss for ids in batches[2:]]  # while the save is written

        other = made(plan, torch.float32)
        sharded = ShardedStep(other)
        state = sharded.state(keeper.read_index())
        loaded = keeper.load(state, aliases=sharded.aliases())
        sharded.load_state(loaded.meta["optimizer"])
        moments = [x for s in other.optimizer.state.values() for x in s.values() if x.dim()]
        where = {x.device.type for x in (*other.params.values(), *moments)}
        return whole, [other.step(ids).loss for ids in batches[2:]], where


@places(2)
def test_checkpoints_hold_what_is_on_the_device(place: Place, tmp_path: Path) -> None:
    for whole, again, where in place.run(resumed, tmp_path):
        assert where == {place.device}
        assert again == pytest.approx(whole, rel=1e-6)
