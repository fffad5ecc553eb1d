"""What ops are priced at: arithmetic as torch counts it, exchanges as the local forms make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hyperparallel.cluster import Rates
from hyperparallel.layout import AllGather, Mesh, SendRecv, reshard
from hyperparallel.shard.axis_states import Choice, choices
from hyperparallel.shard.op_seconds import StepSeconds, op_seconds
from hyperparallel.shard.rules.table import rule_for
from hyperparallel.workload import Op, Ref, Value

aten = torch.ops.aten
ARITHMETIC = Rates(1.0, float("inf"), float("inf"), 0.0)
"""A second for each operation, and nothing for all else."""


def seconds(called: Any, args: tuple[Any, ...], rates: Rates, n: int = 1, cut: str | None = None) -> float:
    """The price of one call on one rank of n, whole or with one factor cut."""
    values: dict[str, Value] = {}

    def named(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            name = f"v{len(values)}"
            values[name] = Value(name, tuple(arg.shape), "float32", 4)
            return Ref(name)
        return list(map(named, arg)) if isinstance(arg, list) else arg

    taken = tuple(map(named, args))
    inputs = tuple(values)
    results = called(*args)
    results = results if isinstance(results, tuple) else (results,)
    made = [isinstance(r, torch.Tensor) and r.numel() > 0 for r in results]
    outputs = tuple(named(r).name if there else None for r, there in zip(results, made, strict=True))
    op = Op("op", str(called), taken, {}, inputs, outputs)
    rule = rule_for(op, values)
    assert rule is not None
    choice: Choice = next(c for c in choices(rule, {}, n) if c.factor == cut)
    held = {name: float(value.num_bytes) for name, value in values.items()}
    return op_seconds(op, rule, choice, {}, held, "tp", n, rates)


def meta(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="meta")


PRODUCTS = {
    "mm": (aten.mm.default, (meta(6, 8), meta(8, 10))),
    "convolution": (
        aten.convolution.default,
        (meta(2, 3, 32, 32), meta(16, 3, 4, 4), None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1),
    ),
    "convolution backward": (
        aten.convolution_backward.default,
        (meta(2, 16, 8, 8), meta(2, 3, 32, 32), meta(16, 3, 4, 4), None, [4, 4], [0, 0], [1, 1], False,
         [0, 0], 1, [True, True, False]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_arithmetic_is_what_torch_counts(name: str) -> None:
    called, args = PRODUCTS[name]
    with FlopCounterMode(display=False) as counted:
        called(*args)
    assert counted.get_total_flops() > 0
    assert seconds(called, args, ARITHMETIC) == counted.get_total_flops()


def test_attention_counts_two_products_and_five_backward() -> None:
    """torch's counter does not know the kernel of CPUs; its formula does."""
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, statistics = meta(2, 4, 16, 8), meta(2, 4, 24, 8), meta(2, 4, 16)
    forward = sdpa_flop_count(q.shape, k.shape, k.shape)
    backward = sdpa_backward_flop_count(q.shape, q.shape, k.shape, k.shape)
    assert seconds(flash.default, (q, k, k), ARITHMETIC) == forward
    assert seconds(back.default, (q, q, k, k, q, statistics, 0.0, False), ARITHMETIC) == backward


EXCHANGED = {
    # op, arguments, the factor that is cut, exchanges, numbers in each, share of their latency that counts
    "log_softmax": (aten._log_softmax.default, (meta(64, 512), 1, False), "b", 2, 64, 0.25),
    "softmax": (aten._softmax.default, (meta(64, 512), 1, False), "b", 2, 64, 1.0),
    "softmax backward": (
        aten._softmax_backward_data.default, (meta(64, 512), meta(64, 512), 1, torch.float32), "b", 1, 64, 1.0
    ),
    "variance": (aten.var.correction, (meta(64, 512), [1]), "b", 2, 64, 1.0),
    "deviation": (aten.std.correction, (meta(64, 512), [1]), "b", 2, 64, 1.0),
    "norm": (aten.linalg_vector_norm.default, (meta(64, 512), 2, [1]), "b", 1, 64, 1.0),
    "log-sum-exp": (aten.logsumexp.default, (meta(64, 512), [1]), "b", 2, 64, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCHANGED)
def test_an_exchange_is_paid_once(name: str) -> None:
    """Latency for each exchange, and its bytes once: an all-reduce brings twice its tensor to a rank."""
    called, args, factor, exchanges, numbers, latency_share = EXCHANGED[name]
    for_latency = Rates(float("inf"), float("inf"), float("inf"), 1.0)
    for_bytes = Rates(float("inf"), float("inf"), 1.0, 0.0)
    assert seconds(called, args, for_latency, 4, factor) == pytest.approx(exchanges * latency_share)
    assert seconds(called, args, for_bytes, 4, factor) == pytest.approx(exchanges * numbers * 4 * 2)


def test_sends_between_meshes_are_priced() -> None:
    """Where links between meshes are slow, each part crosses once and is gathered behind them."""
    left, right = Mesh((4,), ("tp",)), Mesh((4,), ("tp",), (4, 5, 6, 7))
    costs = StepSeconds(Rates(1.0, 1.0, 1e6, 0.0, {"tp": 1e9}), "float32")
    steps = reshard(left(None), right(None), (4096,), 4, costs)
    assert [type(step) for step in steps] == [SendRecv, AllGather]
    assert costs(steps[0], (4096,), 4) == pytest.approx(1024 * 4 / 1e6)
