"""The ops that calibration times beside matrix products, each at a few sizes.

One op stands for each way in which a kernel treats memory or computes: plain streams, transcendental
functions, rows that are normalised, sums, gathers and scatters, strided copies, attention. A figure's work is
what `graph/predict/instructions.py` counts for the same op: bytes read and written, of attention FLOPs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten

COUNTS = (1 << 12, 1 << 16, 1 << 18, 1 << 20)
"""Elements: 16 KB to 4 MB of float32, from what fits the nearest cache to what fits none."""

ROW, WIDE, HEAD_SIZE = 256, 4096, 32
"""Lengths of rows that are normalised or summed, of those of a softmax, and of heads that change places."""

ATTENTION = ((4, 4, 128, 32), (1, 4, 512, 64))
"""Batch, heads, sequence, head size."""


class Kernel(NamedTuple):
    """One op at one size; work: bytes, of attention FLOPs."""

    name: str
    work: float
    call: Callable[[], object]


def kernels(counts: Sequence[int] = COUNTS) -> Iterator[Kernel]:
    """The ops by name, at sizes of that many elements (a multiple of `WIDE`, or 2,048)."""
    for count in counts:
        for name, (call, tensors) in _at(count).items():
            made = [x for x in pytree.tree_leaves(call()) if isinstance(x, Tensor)]
            touched = sum(x.numel() * x.element_size() for x in (*tensors, *made))
            yield Kernel(name, float(touched), call)
    for shape in ATTENTION:
        yield from _attention(*shape)


TimedCall = tuple[Callable[[], object], tuple[Tensor, ...]]
"""A call, and the tensors that it reads."""


def _at(count: int) -> dict[str, TimedCall]:
    a, b, c = (torch.rand(count) + 0.5 for _ in range(3))
    rows = [x.view(-1, ROW) for x in (a, b)]
    wide = [x.view(-1, min(WIDE, count // 4)) for x in (a, b)]
    heads = a.view(-1, 4, HEAD_SIZE).transpose(0, 1)
    layers = a.view(-1, 2, 4 * ROW)
    kinds: list[Callable[[], Tensor]] = [
        lambda: aten.sum(rows[0], [0], True),  # of rows, as of a bias
        lambda: aten.sum(layers, [1]),  # of few large layers, as of shared heads
        lambda: aten.sum(rows[0], [1]),  # of each row
    ]
    sums = itertools.cycle(kinds)
    found: dict[str, TimedCall] = {
        "add": (lambda: aten.add(a, b), (a, b)),
        "mul": (lambda: aten.mul(a, b), (a, b)),
        "addcmul": (lambda: aten.addcmul(a, b, c), (a, b, c)),
        "div": (lambda: aten.div(a, b), (a, b)),
        "pow": (lambda: aten.pow(a, 2), (a,)),
        "_to_copy": (lambda: aten._to_copy(a, dtype=torch.bfloat16), (a,)),
        "linalg_vector_norm": (lambda: aten.linalg_vector_norm(a), (a,)),
        "addmv": (lambda: aten.addmv(c[: count // ROW], rows[0], b[:ROW]), (a, b[:ROW], c[: count // ROW])),
        "mean": (lambda: aten.mean(rows[0], [-1], True), (a,)),
        "sum": (lambda: next(sums)(), (a,)),
        "roll": (lambda: aten.roll(a.view(-1, HEAD_SIZE), [HEAD_SIZE // 2], [1]), (a,)),
        "cat": (lambda: aten.cat(rows, 1), (a, b)),
        "clone": (lambda: aten.clone(heads, memory_format=torch.contiguous_format), (a,)),
        "addcdiv": (lambda: aten.addcdiv(a, b, c), (a, b, c)),
        "lerp": (lambda: aten.lerp(a, b, 0.5), (a, b)),
        "gelu_backward": (lambda: aten.gelu_backward(a, b), (a, b)),
        "silu_backward": (lambda: aten.silu_backward(a, b), (a, b)),
    }
    for name in ("exp", "rsqrt", "sqrt", "cos", "tanh", "sigmoid", "silu", "gelu"):
        found[name] = _unary(getattr(aten, name), a)
    for name in ("_softmax", "_log_softmax"):
        found[name] = _softmax(getattr(aten, name), wide[0])
        found[f"{name}_backward_data"] = _softmax_backward(getattr(aten, f"{name}_backward_data"), *wide)
    return found | _layer_norm(*rows) | _embedding(rows[0])


def _unary(op: Callable[..., Tensor], x: Tensor) -> TimedCall:
    return lambda: op(x), (x,)


def _softmax(op: Callable[..., Tensor], x: Tensor) -> TimedCall:
    return lambda: op(x, -1, False), (x,)


def _softmax_backward(op: Callable[..., Tensor], grad: Tensor, out: Tensor) -> TimedCall:
    return lambda: op(grad, out, -1, torch.float32), (grad, out)


def _layer_norm(x: Tensor, grad: Tensor) -> dict[str, TimedCall]:
    weight, bias = torch.ones(ROW), torch.zeros(ROW)
    _, mean, scale = aten.native_layer_norm(x, [ROW], weight, bias, 1e-5)
    mask = [True, True, True]

    def forward() -> object:
        return aten.native_layer_norm(x, [ROW], weight, bias, 1e-5)

    def backward() -> object:
        return aten.native_layer_norm_backward(grad, x, [ROW], mean, scale, weight, bias, mask)

    return {
        "native_layer_norm": (forward, (x, weight, bias)),
        "native_layer_norm_backward": (backward, (grad, x, mean, scale, weight, bias)),
    }


def _embedding(rows: Tensor) -> dict[str, TimedCall]:
    """As many positions as rows in the table; of a look-up what it gives is counted."""
    count = rows.shape[0]
    ids = torch.randint(0, count, (count,))

    def backward() -> object:
        return aten.embedding_dense_backward(rows, ids, count, -1, False)

    return {
        "embedding": (lambda: aten.embedding(rows, ids), (ids,)),
        "embedding_dense_backward": (backward, (rows, ids)),
    }


def _attention(batch: int, heads: int, length: int, size: int) -> Iterator[Kernel]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    q, k, v, grad = (torch.rand(batch, heads, length, size) for _ in range(4))
    out, scale = forward(q, k, v, 0.0, True)
    flops = 4.0 * batch * heads * length * length * size
    yield Kernel(name, flops, lambda: forward(q, k, v, 0.0, True))
    yield Kernel(f"{name}_backward", 2.5 * flops, lambda: backward(grad, q, k, v, out, scale, 0.0, True))
