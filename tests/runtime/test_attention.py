"""The gradient that stands in for ATen's: the same values, and ATen's where it does not apply."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import hyperparallel as hp
from hyperparallel.runtime import attention
from hyperparallel.runtime.attention import SHORTEST, attention_gradients

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(batch: int, heads: int, positions: int, channels: int, spread: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (batch, positions, heads, channels)
    return [spread * torch.randn(shape, dtype=torch.float64).transpose(1, 2) for _ in range(4)]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", [(2, 3, SHORTEST, 8), (1, 1, SHORTEST + 37, 16), (1, 2, 513, 4)])
def test_gradients_of_causal_attention_are_atens(shape: tuple[int, ...], scale: float | None) -> None:
    grad, *qkv = drawn(*shape)
    out, lse = FORWARD(*qkv, 0.0, True, scale=scale)
    wanted = BACKWARD(grad, *qkv, out, lse, 0.0, True, scale=scale)
    got = attention_gradients(grad, *qkv, out, lse, 0.0, True, scale=scale)
    assert got[0] is not wanted[0]
    for a, b in zip(got, wanted, strict=True):
        assert a.transpose(1, 2).is_contiguous() and b.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_large_scores_do_not_overflow() -> None:
    """Unseen scores far above the seen ones: masked before the exponential, not after."""
    grad, q, k, v = drawn(1, 1, SHORTEST, 4, spread=30.0)
    out, lse = FORWARD(q, k, v, 0.0, True)
    got = attention_gradients(grad, q, k, v, out, lse, 0.0, True)
    wanted = BACKWARD(grad, q, k, v, out, lse, 0.0, True)
    assert all(x.isfinite().all() for x in got)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["whole", "mask", "short", "empty"])
def test_what_does_not_fit_goes_to_aten(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_blocked", None)
    positions = 8 if case == "short" else SHORTEST
    grad, *qkv = drawn(0 if case == "empty" else 1, 2, positions, 4)
    mask = torch.randn(positions, positions, dtype=torch.float64) if case == "mask" else None
    causal = case in ("short", "empty")
    out, lse = FORWARD(*qkv, 0.0, causal, attn_mask=mask)
    got = attention_gradients(grad, *qkv, out, lse, 0.0, causal, attn_mask=mask)
    wanted = BACKWARD(grad, *qkv, out, lse, 0.0, causal, attn_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 24)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q, k, v = self.into(x).view(*x.shape[:2], 2, 12).transpose(1, 2).split(4, -1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return {"loss": out.square().mean()}


def test_a_program_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    blocked = attention._blocked
    monkeypatch.setattr(attention, "_blocked", lambda *args: calls.append(1) or blocked(*args))
    torch.manual_seed(0)
    model, plain = Attention().double(), Attention().double()
    plain.load_state_dict(model.state_dict())
    batch = {"x": torch.randn(2, SHORTEST, 6, dtype=torch.float64)}
    step = hp.TrainStep(
        model, lambda named: torch.optim.SGD(named, lr=0.1), hp.Plan(hp.Layout((1,), ("dp",))), batch
    )
    step.gradients(batch)
    plain(**batch)["loss"].backward()
    assert calls == [1]
    got, wanted = step.params["into.weight"].grad, plain.into.weight.grad
    assert got is not None and wanted is not None
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
