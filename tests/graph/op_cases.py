"""The ops whose rules and local forms are proved, with shapes that do not divide evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """One call. must_cut: factors-by-dim that the rule has to leave free, as (operand, dim)."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    exact: bool = False


def r(*shape: int) -> torch.Tensor:
    """Random numbers, different for every shape but the same in every run."""
    seed = 1 + sum((i + 3) * n for i, n in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def ints(high: int, *shape: int) -> torch.Tensor:
    """Random integers below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(5))


def bools(*shape: int) -> torch.Tensor:
    """Random truth values, about half of them true."""
    return r(*shape) > 0


def cases() -> Iterator[Case]:
    """Every case."""
    for group in (
        _pointwise,
        _views,
        _slices,
        _products,
        _reductions,
        _normalisation,
        _softmax,
        _attention,
        _losses,
        _lookups,
        _writes,
        _factories,
        _random,
        _pooling,
    ):
        yield from group()


def _case(target: Any, *args: Any, label: str = "", exact: bool = False, **kwargs: Any) -> Case:
    name = str(target).removeprefix("aten.").removesuffix(".default")
    return Case(f"{name}-{label}" if label else name, target, args, kwargs, exact)


def _pointwise() -> Iterator[Case]:
    x, y, row, column = r(5, 7), r(7, 5).t(), r(7), r(5, 1)
    for fn in (
        aten.neg, aten.exp, aten.rsqrt, aten.cos, aten.sin, aten.tanh, aten.silu, aten.gelu, aten.relu,
        aten.sigmoid, aten.clone, aten.detach, aten.alias, aten.abs, aten.log1p, aten.erf, aten.sqrt,
    ):  # fmt: skip
        yield _case(fn.default, x.abs())
    for fn in (aten.add, aten.sub, aten.mul, aten.div, aten.rsub):
        yield _case(fn.Tensor, x, y, label="same")
        yield _case(fn.Tensor, x, row, label="row")
        yield _case(fn.Tensor, column, x, label="column")
        yield _case(fn.Scalar, x, 3.0)
    yield _case(aten.add.Tensor, x, 0, label="zero")
    yield _case(aten.add.Tensor, x, y, label="alpha", alpha=3)
    yield _case(aten.mul.Tensor, x, 2.0, label="constant")
    yield _case(aten.mul.Tensor, r(7), r(3, 5, 7), label="lower")
    yield _case(aten.div.Tensor_mode, x, y, rounding_mode="floor")
    yield _case(aten.pow.Tensor_Scalar, x, 2)
    yield _case(aten.pow.Tensor_Scalar, x, 1.0, label="one")
    yield _case(aten.pow.Tensor_Tensor, x.abs(), y)
    yield _case(aten.where.self, bools(5, 1), x, row)
    yield _case(aten.where.ScalarOther, bools(5, 7), x, 0)
    yield _case(aten.where.ScalarOther, bools(5, 7), x, 2, label="two")
    yield _case(aten.masked_fill.Scalar, x, bools(5, 1), 0)
    yield _case(aten.masked_fill.Scalar, x, bools(5, 1), -1.0, label="one")
    yield _case(aten.masked_fill.Tensor, x, bools(7), r())
    yield _case(aten.maximum.default, x, row)
    yield _case(aten.clamp.default, x, -1, 1)
    yield _case(aten.eq.Tensor, ints(3, 5, 1), ints(3, 7))
    yield _case(aten.le.Tensor, ints(3, 5, 1), ints(3, 7))
    yield _case(aten.ne.Scalar, ints(3, 5), 1)
    yield _case(aten.ge.Scalar, ints(3, 5), 1)
    yield _case(aten.bitwise_and.Tensor, bools(), bools(5, 7))
    yield _case(aten.logical_not.default, bools(5, 7))
    yield _case(aten._to_copy.default, x.float(), dtype=F64)
    yield _case(aten._to_copy.default, x, dtype=torch.float32, label="down")
    yield _case(aten._to_copy.default, ints(3, 5), dtype=torch.float32, label="int")
    yield _case(aten.silu_backward.default, x, y)
    yield _case(aten.gelu_backward.default, x, y, approximate="tanh")
    yield _case(aten.tanh_backward.default, x, y)
    yield _case(aten.sigmoid_backward.default, x, y)
    yield _case(aten.threshold_backward.default, x, y, 0)
    yield _case(aten.native_dropout_backward.default, x, bools(5, 7), 2.0)
    yield _case(aten.addcmul.default, x, y, row)
    yield _case(aten.addcdiv.default, x, y, row)
    yield _case(aten.lerp.Scalar, x, y, 0.3)
    yield _case(aten.zeros_like.default, x)
    yield _case(aten.full_like.default, x, 2.0)
    yield _case(aten.copy.default, x, row)
    yield _case(aten.minimum.default, x, y)
    yield _case(aten.max.other, x, y)


def _views() -> Iterator[Case]:
    for before, after in (
        ((2, 6, 5), (12, 5)),
        ((12, 5), (2, 6, 5)),
        ((3, 5, 8), (3, 5, 2, 4)),
        ((3, 5, 2, 4), (3, 5, 8)),
        ((4, 6), (6, 4)),
        ((12, 8), (16, 6)),
        ((3, 8), (4, 6)),
        ((6, 4), (24,)),
        ((5, 1, 6), (5, 6)),
        ((6, 10), (4, 15)),
        ((2, 3, 4, 5), (6, 20)),
        ((7,), (7,)),
        ((1,), ()),
    ):
        yield _case(aten.view.default, r(*before), list(after), label=f"{before}{after}")
    yield _case(aten._unsafe_view.default, r(15, 4), [3, 5, 4])
    yield _case(aten.view.default, r(3, 4, 5), [-1, 5], label="minus")
    yield _case(aten.transpose.int, r(3, 4, 5), 1, 2)
    yield _case(aten.transpose.int, r(3, 4, 5), -1, 0, label="negative")
    yield _case(aten.t.default, r(3, 5))
    yield _case(aten.permute.default, r(3, 4, 5), [2, 0, 1])
    yield _case(aten.movedim.int, r(3, 4, 5), 0, 2)
    yield _case(aten.unsqueeze.default, r(3, 5), -1)
    yield _case(aten.squeeze.dim, r(3, 1, 5), 1)
    yield _case(aten.squeeze.dim, r(3, 2, 5), 1, label="none")
    yield _case(aten.squeeze.default, r(2, 1, 3))
    yield _case(aten.squeeze.dims, r(2, 1, 3, 1), [1, 3])
    yield _case(aten.expand.default, r(3, 1, 5), [2, 3, 4, 5])
    yield _case(aten.expand.default, r(1, 5), [3, -1], label="minus")
    yield _case(aten.repeat.default, r(3, 5), [2, 3, 1])
    yield _case(aten.repeat_interleave.self_int, r(3, 5), 2, 0)
    yield _case(aten.view_as_real.default, torch.complex(r(3, 5), r(3, 5)))
    yield _case(aten.view_as_complex.default, r(3, 5, 2))


def _slices() -> Iterator[Case]:
    x = r(6, 10)
    yield _case(aten.slice.Tensor, x, 1, 0, 5, label="half")
    yield _case(aten.slice.Tensor, x, 1, 5, 9223372036854775807, label="other half")
    yield _case(aten.slice.Tensor, x, 1, 0, 10, label="full")
    yield _case(aten.slice.Tensor, x, 0, 1, -1, label="odd")
    yield _case(aten.slice.Tensor, x, 1, 1, 9, 2, label="step")
    yield _case(aten.slice.Tensor, x, 0, 0, 1, label="one")
    yield _case(aten.slice_backward.default, r(6, 5), [6, 10], 1, 5, 9223372036854775807, 1)
    yield _case(aten.slice_backward.default, r(4, 10), [6, 10], 0, 1, 5, 1, label="odd")
    yield _case(
        aten.slice_backward.default, r(6, 10), [6, 10], 0, 0, 9223372036854775807, 1, label="full"
    )
    yield _case(aten.slice_scatter.default, x, r(6, 3), 1, 2, 5)
    yield _case(aten.select.int, r(6, 4, 5), 1, 2)
    yield _case(aten.select_backward.default, r(6, 5), [6, 4, 5], 1, 2)
    yield _case(aten.select_scatter.default, r(6, 4, 5), r(6, 5), 1, 2)
    yield _case(aten.split.Tensor, r(5, 12), 4, 1)
    yield _case(aten.split.Tensor, r(5, 12), 5, 1, label="uneven")
    yield _case(aten.split_with_sizes.default, r(5, 12), [6, 6], 1)
    yield _case(aten.split_with_sizes.default, r(5, 12), [2, 10], 1, label="uneven")
    yield _case(aten.unbind.int, r(5, 3), 1)
    yield _case(aten.cat.default, [r(5, 3), r(5, 4)], 1)
    yield _case(aten.cat.default, [r(5, 3), r(5, 3)], -1, label="equal")
    yield _case(aten.stack.default, [r(5, 3), r(5, 3)], 1)
    yield _case(aten.constant_pad_nd.default, r(5, 6), [0, 1], 0)
    yield _case(aten.constant_pad_nd.default, r(5, 6), [0, 1], -100.0, label="value")
    yield _case(aten.flip.default, r(5, 6), [1])
    yield _case(aten.roll.default, r(5, 6), [2], [1])
    yield _case(aten.roll.default, r(5, 6), [2], label="all")
    yield _case(aten.tril.default, r(5, 7), 1)
    yield _case(aten.triu.default, r(3, 5, 7), -1)


def _products() -> Iterator[Case]:
    yield _case(aten.mm.default, r(5, 6), r(6, 7))
    yield _case(aten.bmm.default, r(3, 5, 6), r(3, 6, 7))
    yield _case(aten.mv.default, r(5, 6), r(6))
    yield _case(aten.dot.default, r(6), r(6))
    yield _case(aten.addmm.default, r(7), r(5, 6), r(6, 7))
    yield _case(aten.addmm.default, r(5, 7), r(5, 6), r(6, 7), label="full", beta=2, alpha=3)
    yield _case(aten.addmm.default, r(5, 1), r(5, 6), r(6, 7), label="column")
    yield _case(aten.baddbmm.default, r(1, 5, 7), r(3, 5, 6), r(3, 6, 7), beta=2)
    yield _case(aten.addmv.default, r(5), r(5, 6), r(6))
    yield _case(aten.linear.default, r(3, 5, 6), r(7, 6), r(7))
    yield _case(aten.linear.default, r(3, 5, 6), r(7, 6), label="plain")
    conv = ([2, 2], [0, 0], [1, 1], False, [0, 0])
    yield _case(aten.convolution.default, r(3, 4, 6, 6), r(5, 4, 2, 2), r(5), *conv, 1)
    yield _case(
        aten.convolution.default, r(3, 4, 6, 6), r(5, 4, 2, 2), None, *conv, 1, label="bare"
    )
    yield _case(
        aten.convolution.default, r(3, 6, 6, 6), r(9, 2, 2, 2), r(9), *conv, 3, label="groups"
    )
    yield _case(
        aten.convolution_backward.default, r(3, 5, 3, 3), r(3, 4, 6, 6), r(5, 4, 2, 2), [5], *conv, 1,
        [True, True, True],
    )  # fmt: skip
    yield _case(
        aten.convolution_backward.default, r(3, 9, 3, 3), r(3, 6, 6, 6), r(9, 2, 2, 2), [9], *conv, 3,
        [True, True, False], label="groups",
    )  # fmt: skip


def _reductions() -> Iterator[Case]:
    x = r(5, 6, 3)
    yield _case(aten.sum.default, x)
    yield _case(aten.sum.dim_IntList, x, [0, 1], True)
    yield _case(aten.sum.dim_IntList, x, [-1], label="last")
    yield _case(aten.sum.dim_IntList, x, [], label="all")
    yield _case(aten.mean.default, x)
    yield _case(aten.mean.dim, x, [-2], True)
    yield _case(aten.mean.dim, x, [0, 1], label="two")
    yield _case(aten.amax.default, x, [1])
    yield _case(aten.amax.default, -ints(9, 5, 6), [0], label="int")
    yield _case(aten.amin.default, x, [0], True)
    yield _case(aten.max.default, x)
    yield _case(aten.min.default, x)
    yield _case(aten.max.dim, x, 1)
    yield _case(aten.argmax.default, x, 1)
    yield _case(aten.any.dim, bools(5, 6), 1)
    yield _case(aten.all.default, bools(5, 6))
    yield _case(aten.prod.default, x)
    yield _case(aten.prod.dim_int, x, 1)
    yield _case(aten.var.correction, x, [1], correction=0)
    yield _case(aten.var.correction, x, label="all")
    yield _case(aten.var.dim, x, [0, 1], True, True)
    yield _case(aten.var_mean.correction, x, [1], correction=1, keepdim=True)
    yield _case(aten.std.correction, x, [0])
    yield _case(aten.std.dim, x, [0], False)
    yield _case(aten.linalg_vector_norm.default, x)
    for order in (0, 1, 3, float("inf"), float("-inf")):
        yield _case(aten.linalg_vector_norm.default, x, order, [1], True, label=str(order))
    yield _case(aten.norm.Scalar, x, 2)
    yield _case(aten.norm.ScalarOpt_dim, x, 2, [1])
    yield _case(aten.logsumexp.default, x, [1])
    yield _case(
        aten.logsumexp.default, torch.full((3, 5), float("-inf"), dtype=F64), [1], True, label="low"
    )
    yield _case(aten.cumsum.default, x, 1)
    yield _case(aten.cumsum.default, ints(3, 5, 6), -1, label="int")
    yield _case(aten.topk.default, x, 2, 1)
    yield _case(aten.sort.default, x, 1)
    yield _case(aten.sort.stable, x, stable=True, dim=1)
    yield _case(aten.median.dim, x, 1)
    yield _case(aten.count_nonzero.dim_IntList, ints(3, 5, 6), [1])


def _normalisation() -> Iterator[Case]:
    x, w, b = r(5, 3, 6), r(6), r(6)
    out = aten.native_layer_norm.default(x, [6], w, b, 1e-5)
    yield _case(aten.native_layer_norm.default, x, [6], w, b, 1e-5)
    yield _case(aten.native_layer_norm.default, x, [3, 6], None, None, 1e-5, label="plain")
    yield _case(
        aten.native_layer_norm_backward.default,
        r(5, 3, 6),
        x,
        [6],
        out[1],
        out[2],
        w,
        b,
        [True] * 3,
    )
    # Its backward has no CPU kernel: `test_localise_gpu.py` has it.
    yield _case(aten._fused_rms_norm.default, x, [6], w, 1e-5)
    images = r(5, 6, 4)
    yield _case(aten.native_group_norm.default, images, r(6), r(6), 5, 6, 4, 3, 1e-5)
    group = aten.native_group_norm.default(images, w, b, 5, 6, 4, 3, 1e-5)
    yield _case(
        aten.native_group_norm_backward.default, r(5, 6, 4), images, group[1], group[2], w, 5, 6, 4, 3,
        [True] * 3,
    )  # fmt: skip
    stats = (r(6), r(6).abs())
    yield _case(aten.native_batch_norm.default, images, w, b, *stats, True, 0.1, 1e-5)
    yield _case(
        aten.native_batch_norm.default, images, w, b, *stats, False, 0.1, 1e-5, label="eval"
    )
    yield _case(
        aten._native_batch_norm_legit_functional.default, images, w, b, *stats, True, 0.1, 1e-5
    )
    batch = aten.native_batch_norm.default(images, w, b, *stats, True, 0.1, 1e-5)
    yield _case(
        aten.native_batch_norm_backward.default, r(5, 6, 4), images, w, *stats, batch[1], batch[2],
        True, 1e-5, [True] * 3,
    )  # fmt: skip


def _softmax() -> Iterator[Case]:
    x = r(3, 7, 5) * 5
    for dim in (1, -1):
        yield _case(aten._log_softmax.default, x, dim, False, label=str(dim))
        yield _case(aten._softmax.default, x, dim, False, label=str(dim))
    low = x.clone()
    low[:, :5] = float("-inf")
    low[1] = float("-inf")
    yield _case(aten._safe_softmax.default, low, 1)
    yield _case(aten._log_softmax.default, low[:1], 1, False, label="low")
    grad = r(3, 7, 5)
    yield _case(aten._log_softmax_backward_data.default, grad, x.log_softmax(1), 1, F64)
    yield _case(aten._softmax_backward_data.default, grad, x.softmax(1), 1, F64)


def _attention() -> Iterator[Case]:
    for label, heads, groups, kwargs in (
        ("plain", 4, 4, {}),
        ("mask", 4, 4, {"attn_mask": r(1, 1, 5, 6)}),
        ("causal", 4, 4, {}),
    ):
        q, k, v = r(3, heads, 5, 8), r(3, groups, 6, 8), r(3, groups, 6, 8) + 1
        causal = label == "causal"
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        yield _case(forward, q, k, v, 0.0, causal, label=label, scale=0.3, **kwargs)
        out, rows = forward(q, k, v, 0.0, causal, scale=0.3, **kwargs)
        yield _case(
            backward,
            r(*out.shape),
            q,
            k,
            v,
            out,
            rows,
            0.0,
            causal,
            label=label,
            scale=0.3,
            **kwargs,
        )
    math = aten._scaled_dot_product_attention_math.default
    yield _case(math, r(2, 4, 5, 8), r(2, 2, 6, 8), r(2, 2, 6, 8), label="grouped", enable_gqa=True)


def _losses() -> Iterator[Case]:
    x = (torch.arange(28, dtype=F64).view(4, 7) / 10).log_softmax(1)
    target = torch.tensor([0, 6, -100, 2])
    weight = torch.linspace(0.5, 1.5, 7, dtype=F64)
    for reduction in (0, 1, 2):
        for w in (None, weight):
            label = f"{reduction}{'w' if w is not None else ''}"
            args = (x, target, w, reduction, -100)
            yield _case(aten.nll_loss_forward.default, *args, label=label)
            _, total = aten.nll_loss_forward.default(*args)
            grad = r(4) if reduction == 0 else r()
            yield _case(aten.nll_loss_backward.default, grad, *args, total, label=label)
    ignored = torch.full((4,), 3)
    yield _case(aten.nll_loss_forward.default, x, ignored, None, 1, 3, label="ignored")
    yield _case(aten.nll_loss_forward.default, x[0], target[0], None, 1, -100, label="single")
    pixels, where = r(3, 4, 2, 5).log_softmax(1), ints(4, 3, 2, 5)
    yield _case(aten.nll_loss2d_forward.default, pixels, where, None, 1, -100)
    for fn, rest in ((aten.mse_loss, ()), (aten.smooth_l1_loss, (1.0,)), (aten.huber_loss, (1.0,))):
        backward = getattr(aten, fn.__name__.rpartition(".")[-1] + "_backward").default
        for reduction in (0, 1, 2):
            label = str(reduction)
            yield _case(fn.default, r(5, 3), r(3, 5).t(), reduction, *rest, label=label)
            grad = r(5, 3) if reduction == 0 else r()
            yield _case(backward, grad, r(5, 3), r(3, 5).t(), reduction, *rest, label=label)


def _lookups() -> Iterator[Case]:
    ids = ints(7, 4, 3)
    yield _case(aten.embedding.default, r(7, 5), ids)
    yield _case(aten.embedding.default, r(7, 5), ids, 3, label="padding")
    for padding in (-1, 1, 5, 6):
        some = torch.tensor([0, 1, 5, 5, 6, 4])
        yield _case(
            aten.embedding_dense_backward.default,
            r(6, 3),
            some,
            7,
            padding,
            False,
            label=str(padding),
        )
    yield _case(
        aten.embedding_dense_backward.default, r(4, 3, 5), ids, 7, -1, True, label="frequency"
    )
    yield _case(aten.gather.default, r(5, 7), 1, ints(7, 5, 3))
    yield _case(aten.gather.default, r(5, 7), 1, ints(7, 4, 3), label="shorter")
    yield _case(aten.gather.default, bools(5, 7), 1, ints(7, 5, 3), label="bool")
    yield _case(aten.index_select.default, r(5, 7), 1, ints(7, 4))
    yield _case(aten.index.Tensor, r(5, 7), [ints(5, 4, 1), ints(7, 3)], label="both")
    yield _case(aten.index.Tensor, r(5, 7, 6), [None, ints(7, 4, 3)], label="middle")
    yield _case(aten.index.Tensor, r(5, 7, 6), [ints(5, 4), None, ints(6, 4)], label="apart")
    yield _case(aten.index.Tensor, r(5, 7), [ints(5, 4, 3)], label="rows")
    yield _case(aten.index.Tensor, r(5, 7), [bools(5)], label="mask")


def _writes() -> Iterator[Case]:
    x = r(5, 7)
    yield _case(aten.scatter.src, x, 1, ints(7, 5, 1), r(5, 1))
    yield _case(aten.scatter.value, x, 1, ints(7, 5, 3), 2.0)
    yield _case(aten.scatter_add.default, x, 1, ints(7, 5, 4), r(5, 4))
    yield _case(aten.scatter_reduce.two, x, 1, ints(7, 5, 4), r(5, 4), "amax")
    yield _case(aten.index_add.default, x, 0, ints(5, 4), r(4, 7), alpha=2)
    yield _case(aten.index_copy.default, x, 0, torch.tensor([3, 1]), r(2, 7))
    for add in (True, False):
        label = "add" if add else "set"
        where = [torch.tensor([[0], [3], [4]]), torch.tensor([2, 5])]
        yield _case(aten.index_put.default, x, where, r(3, 2), add, label=label)
        yield _case(
            aten.index_put.default, x, [torch.tensor([0, 3, 4])], r(7), add, label=f"rows-{label}"
        )
        yield _case(
            aten.index_put.default, r(5, 7, 3), [None, torch.tensor([0, 3, 6, 6 - add])], r(5, 4, 3), add,
            label=f"middle-{label}",
        ) if add else _case(aten.index_put.default, x, [torch.tensor([0, 3])], r(2, 7), add, label="two")  # fmt: skip


def _factories() -> Iterator[Case]:
    yield _case(aten.arange.default, 7)
    yield _case(aten.arange.start, 2, 9)
    yield _case(aten.arange.start_step, 1, 20, 3)
    yield _case(aten.arange.start_step, 0.0, 1.0, 0.15, label="float", dtype=F64)
    yield _case(aten.arange.default, 7, label="cast", dtype=F64)
    yield _case(aten.zeros.default, [5, 6])
    yield _case(aten.ones.default, [5, 6], dtype=F64)
    yield _case(aten.full.default, [5, 6], 2.5, dtype=F64)
    yield _case(aten.scalar_tensor.default, 2.5, dtype=F64)
    yield _case(aten.new_zeros.default, r(3, 2), [5, 6])
    yield _case(aten.new_ones.default, r(3, 2), [], dtype=torch.bool)
    yield _case(aten.new_full.default, r(3, 2), [5, 6], 2.5)
    yield _case(aten.linspace.default, 0, 1, 7, dtype=F64)
    yield _case(aten.eye.default, 5, dtype=F64)


def _random() -> Iterator[Case]:
    x = r(5, 6).abs().clamp(max=1)
    yield _case(aten.native_dropout.default, x, 0.4, True, exact=True)
    yield _case(aten.native_dropout.default, x.t(), 0.4, True, exact=True, label="transposed")
    yield _case(aten.native_dropout.default, x, 0.4, False, exact=True, label="eval")
    yield _case(aten.native_dropout.default, x, 1.0, True, exact=True, label="all")
    yield _case(aten.bernoulli.p, x, 0.3, exact=True)
    yield _case(aten.bernoulli.p, x.t(), 0.3, exact=True, label="transposed")
    yield _case(aten.bernoulli.default, x, exact=True)
    yield _case(aten.rand.default, [5, 6], exact=True)
    yield _case(aten.randn.default, [5, 6], exact=True)
    yield _case(aten.randint.low, 2, 9, [5, 6], exact=True)
    yield _case(aten.rand_like.default, x, exact=True)
    yield _case(aten.randn_like.default, x.t(), exact=True, label="transposed")
    yield _case(aten.exponential.default, x, exact=True)
    yield _case(aten.normal_functional.default, x, exact=True)
    yield _case(aten.uniform.default, x, exact=True)
    yield _case(aten.randperm.default, 7, exact=True)


def _pooling() -> Iterator[Case]:
    image = r(3, 5, 6, 4)
    yield _case(aten.avg_pool2d.default, image, [2, 2])
    yield _case(
        aten.avg_pool2d_backward.default,
        r(3, 5, 3, 2),
        image,
        [2, 2],
        [2, 2],
        [0, 0],
        False,
        True,
        None,
    )
    yield _case(aten._adaptive_avg_pool2d.default, image, [3, 2])
    yield _case(aten.max_pool2d_with_indices.default, image, [2, 2])
    yield _case(aten.upsample_bicubic2d.default, image, [9, 8], False)
    yield _case(
        aten.upsample_bicubic2d_backward.default, r(3, 5, 9, 8), [9, 8], [3, 5, 6, 4], False
    )
    yield _case(aten.upsample_bilinear2d.default, image, [9, 8], False)
