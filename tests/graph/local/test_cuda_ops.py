"""Ops that only CUDA computes: rules fit the shapes of meta tensors, and are proved on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import rule_for
from tests.graph.local.op_case import aten
from tests.graph.local.test_localise import free
from tests.graph.local.virtual_op import OpRun

Call = tuple[Any, tuple[Any, ...]]


def operand(device: str, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    if device == "meta":
        return torch.empty(shape, device=device, dtype=dtype)
    seed = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=seed).to(device, dtype)


def calls(device: str) -> Iterator[Call]:
    """Each fused attention forward with its backward, and the backward of the fused RMS norm."""
    q, k, v = (operand(device, 4, 8, s, 64) for s in (128, 64, 64))
    grad = operand(device, 4, 8, 128, 64)
    flash = aten._scaled_dot_product_flash_attention.default
    yield flash, (q, k, v, 0.0, False, False)
    out, rows, cum_q, cum_k, most_q, most_k, seed, offset, _ = flash(q, k, v, 0.0, False, False)
    kept = (cum_q, cum_k, most_q, most_k, 0.0, False, seed, offset)
    yield (
        aten._scaled_dot_product_flash_attention_backward.default,
        (grad, q, k, v, out, rows, *kept),
    )
    efficient = aten._scaled_dot_product_efficient_attention.default
    bias = operand(device, 1, 1, 128, 64).expand(4, 8, 128, 64)
    yield efficient, (q, k, v, bias, True, 0.0, False)
    out, rows, seed, offset = efficient(q, k, v, bias, True, 0.0, False)
    mask = [True, True, True, False]
    yield (
        aten._scaled_dot_product_efficient_attention_backward.default,
        (grad, q, k, v, bias, out, rows, seed, offset, 0.0, mask, False),
    )
    x, w = operand(device, 5, 3, 64, dtype=torch.float32), operand(device, 64, dtype=torch.float32)
    _, rstd = aten._fused_rms_norm.default(x, [64], w, 1e-5)
    yield (
        aten._fused_rms_norm_backward.default,
        (operand(device, 5, 3, 64, dtype=torch.float32), x, [64], rstd, w, [True, True]),
    )


def prepared(call: Call) -> tuple[OpRun, Rule]:
    run = OpRun(call[0], call[1], {})
    rule = rule_for(run.op, run.values)
    assert rule is not None
    return run, rule


@pytest.mark.fake
def test_rules_fit_the_shapes() -> None:
    for call in calls("meta"):
        run, rule = prepared(call)
        for names, operands in ((run.op.inputs, rule.inputs), (run.op.outputs, rule.outputs)):
            for name, dims in zip(names, operands, strict=True):
                if name is not None:
                    assert dims is not None, (run.op.target, name)
                    shape = tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims)
                    assert shape == run.values[name].shape, (run.op.target, name)
        assert {"b", "h", "s"} <= set(free(rule)) or "rms" in run.op.target, run.op.target


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rules_are_proved() -> None:
    for call in calls("cuda"):
        run, rule = prepared(call)
        wide = 3 if "rms" in run.op.target else 2
        for factor in free(rule):
            got = run.cut(rule, {factor: 2})
            for i, (a, b) in enumerate(zip(got, run.results, strict=True)):
                # What a kernel keeps for itself (a random state) is whole, but need not be equal.
                if a is None or (i >= wide and "backward" not in run.op.target):
                    continue
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("transposed", [False, True])
def test_dropout_masks_equal_the_whole_run(transposed: bool) -> None:
    x = operand("cuda", 6, 40, dtype=torch.float32)
    run, rule = prepared((aten.native_dropout.default, (x.t() if transposed else x, 0.4, True)))
    for factor in free(rule):
        for a, b in zip(run.cut(rule, {factor: 3}), run.results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
