"""Regions on real ranks: `parallelize` and `TrainStep` beside the same model without a region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyperparallel as hp
from hyperparallel.graph.region.segments import Segment
from hyperparallel.runtime.exec.inductor import Stretch
from tests.graph.region.regions import (
    HEADS,
    FromFirst,
    Mlp,
    Stack,
    less_first,
    pending_mlp,
    reduced_mlp,
    ring_attention,
)
from tests.runtime.module.dense import assert_close, assert_same_grads, on_ranks, whole
from tests.runtime.module.small import made, numbers

pytestmark = pytest.mark.procs
RING = hp.local_region(ring_attention, [HEADS] * 3, HEADS)
CP, TP = hp.Layout((1, 4), ("dp", "cp")), hp.Layout((2, 2), ("dp", "tp"))


def pair(
    cls: type[nn.Module], region: Any, plan: hp.Plan, batch: Any, *more: Any
) -> tuple[nn.Module, nn.Module]:
    plain = made(cls, None, *more)
    model = made(cls, region, *more)
    model.load_state_dict(plain.state_dict())
    return hp.parallelize(model, plan, batch), plain


def test_ring_attention_on_four_ranks() -> None:
    """A deep stack of it, for several steps of SGD."""

    def check() -> None:
        x = numbers(2, 8, 8)
        model, plain = pair(Stack, RING, hp.Plan(CP), x, 2)
        for module in (model, plain):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                loss = module(x)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            if module is model:
                got = losses
        assert_close(torch.stack(got), torch.stack(losses))
        assert_same_grads(model, plain)
        model.eval()
        with torch.no_grad():
            assert_close(model(x), plain(x))

    on_ranks(4, check)


def test_an_mlp_by_hand_on_four_ranks_with_an_uneven_batch() -> None:
    def check() -> None:
        for region in (reduced_mlp, pending_mlp):
            for plan in (hp.Plan(TP), hp.Plan(TP, fsdp="dp")):
                model, plain = pair(Mlp, region, plan, numbers(5, 4))
                got, true = model(numbers(5, 4)), plain(numbers(5, 4))
                assert_close(got, true)
                got.backward()
                true.backward()
                assert_same_grads(model, plain)

    on_ranks(4, check)


@pytest.mark.parametrize("transport", ["auto", "messages"])
def test_a_row_of_one_rank_on_four_ranks(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank has no row of five; the root's gradient is the sum of all ranks'."""
    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", transport)

    def check() -> None:
        for rows in (4, 5):
            model, plain = pair(FromFirst, less_first, hp.Plan(TP), numbers(rows, 4))
            got, true = model(numbers(rows, 4)), plain(numbers(rows, 4))
            assert_close(got, true)
            got.backward()
            true.backward()
            assert_same_grads(model, plain)

    on_ranks(4, check)


def test_a_training_step_with_micro_batches() -> None:
    def check() -> None:
        x, plain = numbers(8, 4), made(Mlp)
        model = made(Mlp, pending_mlp)
        model.load_state_dict(plain.state_dict())
        step = hp.TrainStep(
            model, lambda named: torch.optim.AdamW(named, lr=0.1), hp.Plan(TP), x, accumulate=2, clip=1.0
        )
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for _ in range(3):
            loss = plain(x)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            assert abs(step.step(x).loss - float(loss.detach())) < 1e-12
        for name, parameter in plain.named_parameters():
            assert_close(whole(model.get_parameter(name)), parameter, 1e-9)

    on_ranks(4, check)


def test_code_between_collectives_goes_through_inductor() -> None:
    def check() -> int:
        x = numbers(2, 8, 8)
        plain, model = made(Stack), made(Stack, RING)
        model.load_state_dict(plain.state_dict())
        step = hp.TrainStep(
            model, lambda named: torch.optim.SGD(named, lr=0.1), hp.Plan(hp.Layout((1, 2), ("dp", "cp"))), x,
            compile=True,
        )  # fmt: skip
        loss = plain(x)
        loss.backward()
        assert abs(step.step(x).loss - float(loss.detach())) < 1e-12
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert_close(whole(model.get_parameter(name)), parameter - 0.1 * parameter.grad, 1e-11)
        compiled = [
            n.target for n in step.program.compiled.program.graph.nodes if isinstance(n.target, Segment)
        ]
        return sum(isinstance(segment.code, Stretch) for segment in compiled)

    assert min(on_ranks(2, check)) >= 4
