"""Ops that compute, with shapes that do not divide evenly."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.graph.local.op_case import F64, Case, aten, bools, case, ints, r


def cases() -> Iterator[Case]:
    """Every case of this kind."""
    for group in (
        _pointwise,
        _products,
        _reductions,
        _normalisation,
        _softmax,
        _attention,
        _losses,
        _pooling,
    ):
        yield from group()


def _pointwise() -> Iterator[Case]:
    x, y, row, column = r(5, 7), r(7, 5).t(), r(7), r(5, 1)
    for fn in (
        aten.neg,
        aten.exp,
        aten.rsqrt,
        aten.cos,
        aten.sin,
        aten.tanh,
        aten.silu,
        aten.gelu,
        aten.relu,
        aten.sigmoid,
        aten.clone,
        aten.detach,
        aten.alias,
        aten.abs,
        aten.log1p,
        aten.erf,
        aten.sqrt,
    ):
        yield case(fn.default, x.abs())
    for fn in (aten.add, aten.sub, aten.mul, aten.div, aten.rsub):
        yield case(fn.Tensor, x, y, label="same")
        yield case(fn.Tensor, x, row, label="row")
        yield case(fn.Tensor, column, x, label="column")
        yield case(fn.Scalar, x, 3.0)
    yield case(aten.add.Tensor, x, 0, label="zero")
    yield case(aten.add.Tensor, x, y, label="alpha", alpha=3)
    yield case(aten.mul.Tensor, x, 2.0, label="constant")
    yield case(aten.mul.Tensor, r(7), r(3, 5, 7), label="lower")
    yield case(aten.div.Tensor_mode, x, y, rounding_mode="floor")
    yield case(aten.pow.Tensor_Scalar, x, 2)
    yield case(aten.pow.Tensor_Scalar, x, 1.0, label="one")
    yield case(aten.pow.Tensor_Tensor, x.abs(), y)
    yield case(aten.where.self, bools(5, 1), x, row)
    yield case(aten.where.ScalarOther, bools(5, 7), x, 0)
    yield case(aten.where.ScalarOther, bools(5, 7), x, 2, label="two")
    yield case(aten.masked_fill.Scalar, x, bools(5, 1), 0)
    yield case(aten.masked_fill.Scalar, x, bools(5, 1), -1.0, label="one")
    yield case(aten.masked_fill.Tensor, x, bools(7), r())
    yield case(aten.maximum.default, x, row)
    yield case(aten.clamp.default, x, -1, 1)
    yield case(aten.eq.Tensor, ints(3, 5, 1), ints(3, 7))
    yield case(aten.le.Tensor, ints(3, 5, 1), ints(3, 7))
    yield case(aten.ne.Scalar, ints(3, 5), 1)
    yield case(aten.ge.Scalar, ints(3, 5), 1)
    yield case(aten.bitwise_and.Tensor, bools(), bools(5, 7))
    yield case(aten.logical_not.default, bools(5, 7))
    yield case(aten._to_copy.default, x.float(), dtype=F64)
    yield case(aten._to_copy.default, x, dtype=torch.float32, label="down")
    yield case(aten._to_copy.default, ints(3, 5), dtype=torch.float32, label="int")
    yield case(aten.silu_backward.default, x, y)
    yield case(aten.gelu_backward.default, x, y, approximate="tanh")
    yield case(aten.tanh_backward.default, x, y)
    yield case(aten.sigmoid_backward.default, x, y)
    yield case(aten.threshold_backward.default, x, y, 0)
    yield case(aten.native_dropout_backward.default, x, bools(5, 7), 2.0)
    yield case(aten.addcmul.default, x, y, row)
    yield case(aten.addcdiv.default, x, y, row)
    yield case(aten.lerp.Scalar, x, y, 0.3)
    yield case(aten.zeros_like.default, x)
    yield case(aten.full_like.default, x, 2.0)
    yield case(aten.copy.default, x, row)
    yield case(aten.minimum.default, x, y)
    yield case(aten.max.other, x, y)


def _products() -> Iterator[Case]:
    yield case(aten.mm.default, r(5, 6), r(6, 7))
    yield case(aten.bmm.default, r(3, 5, 6), r(3, 6, 7))
    yield case(aten.mv.default, r(5, 6), r(6))
    yield case(aten.dot.default, r(6), r(6))
    yield case(aten.addmm.default, r(7), r(5, 6), r(6, 7))
    yield case(aten.addmm.default, r(5, 7), r(5, 6), r(6, 7), label="full", beta=2, alpha=3)
    yield case(aten.addmm.default, r(5, 1), r(5, 6), r(6, 7), label="column")
    yield case(aten.baddbmm.default, r(1, 5, 7), r(3, 5, 6), r(3, 6, 7), beta=2)
    yield case(aten.addmv.default, r(5), r(5, 6), r(6))
    yield case(aten.linear.default, r(3, 5, 6), r(7, 6), r(7))
    yield case(aten.linear.default, r(3, 5, 6), r(7, 6), label="plain")
    conv = ([2, 2], [0, 0], [1, 1], False, [0, 0])
    yield case(aten.convolution.default, r(3, 4, 6, 6), r(5, 4, 2, 2), r(5), *conv, 1)
    yield case(aten.convolution.default, r(3, 4, 6, 6), r(5, 4, 2, 2), None, *conv, 1, label="bare")
    yield case(
        aten.convolution.default, r(3, 6, 6, 6), r(9, 2, 2, 2), r(9), *conv, 3, label="groups"
    )
    yield case(
        aten.convolution_backward.default,
        r(3, 5, 3, 3),
        r(3, 4, 6, 6),
        r(5, 4, 2, 2),
        [5],
        *conv,
        1,
        [True, True, True],
    )
    yield case(
        aten.convolution_backward.default,
        r(3, 9, 3, 3),
        r(3, 6, 6, 6),
        r(9, 2, 2, 2),
        [9],
        *conv,
        3,
        [True, True, False],
        label="groups",
    )


def _reductions() -> Iterator[Case]:
    x = r(5, 6, 3)
    yield case(aten.sum.default, x)
    yield case(aten.sum.dim_IntList, x, [0, 1], True)
    yield case(aten.sum.dim_IntList, x, [-1], label="last")
    yield case(aten.sum.dim_IntList, x, [], label="all")
    yield case(aten.mean.default, x)
    yield case(aten.mean.dim, x, [-2], True)
    yield case(aten.mean.dim, x, [0, 1], label="two")
    yield case(aten.amax.default, x, [1])
    yield case(aten.amax.default, -ints(9, 5, 6), [0], label="int")
    yield case(aten.amin.default, x, [0], True)
    yield case(aten.max.default, x)
    yield case(aten.min.default, x)
    yield case(aten.max.dim, x, 1)
    yield case(aten.argmax.default, x, 1)
    yield case(aten.any.dim, bools(5, 6), 1)
    yield case(aten.all.default, bools(5, 6))
    yield case(aten.prod.default, x)
    yield case(aten.prod.dim_int, x, 1)
    yield case(aten.var.correction, x, [1], correction=0)
    yield case(aten.var.correction, x, label="all")
    yield case(aten.var.dim, x, [0, 1], True, True)
    yield case(aten.var_mean.correction, x, [1], correction=1, keepdim=True)
    yield case(aten.std.correction, x, [0])
    yield case(aten.std.dim, x, [0], False)
    yield case(aten.linalg_vector_norm.default, x)
    for order in (0, 1, 3, float("inf"), float("-inf")):
        yield case(aten.linalg_vector_norm.default, x, order, [1], True, label=str(order))
    yield case(aten.norm.Scalar, x, 2)
    yield case(aten.norm.ScalarOpt_dim, x, 2, [1])
    yield case(aten.logsumexp.default, x, [1])
    yield case(
        aten.logsumexp.default, torch.full((3, 5), float("-inf"), dtype=F64), [1], True, label="low"
    )
    yield case(aten.cumsum.default, x, 1)
    yield case(aten.cumsum.default, ints(3, 5, 6), -1, label="int")
    yield case(aten.topk.default, x, 2, 1)
    yield case(aten.sort.default, x, 1)
    yield case(aten.sort.stable, x, stable=True, dim=1)
    yield case(aten.median.dim, x, 1)
    yield case(aten.count_nonzero.dim_IntList, ints(3, 5, 6), [1])


def _normalisation() -> Iterator[Case]:
    x, w, b = r(5, 3, 6), r(6), r(6)
    out = aten.native_layer_norm.default(x, [6], w, b, 1e-5)
    yield case(aten.native_layer_norm.default, x, [6], w, b, 1e-5)
    yield case(aten.native_layer_norm.default, x, [3, 6], None, None, 1e-5, label="plain")
    yield case(
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
    # Its backward has no CPU kernel: `test_cuda_ops.py` has it.
    yield case(aten._fused_rms_norm.default, x, [6], w, 1e-5)
    images = r(5, 6, 4)
    yield case(aten.native_group_norm.default, images, r(6), r(6), 5, 6, 4, 3, 1e-5)
    group = aten.native_group_norm.default(images, w, b, 5, 6, 4, 3, 1e-5)
    yield case(
        aten.native_group_norm_backward.default,
        r(5, 6, 4),
        images,
        group[1],
        group[2],
        w,
        5,
        6,
        4,
        3,
        [True] * 3,
    )
    stats = (r(6), r(6).abs())
    yield case(aten.native_batch_norm.default, images, w, b, *stats, True, 0.1, 1e-5)
    yield case(aten.native_batch_norm.default, images, w, b, *stats, False, 0.1, 1e-5, label="eval")
    yield case(
        aten._native_batch_norm_legit_functional.default, images, w, b, *stats, True, 0.1, 1e-5
    )
    batch = aten.native_batch_norm.default(images, w, b, *stats, True, 0.1, 1e-5)
    yield case(
        aten.native_batch_norm_backward.default,
        r(5, 6, 4),
        images,
        w,
        *stats,
        batch[1],
        batch[2],
        True,
        1e-5,
        [True] * 3,
    )


def _softmax() -> Iterator[Case]:
    x = r(3, 7, 5) * 5
    for dim in (1, -1):
        yield case(aten._log_softmax.default, x, dim, False, label=str(dim))
        yield case(aten._softmax.default, x, dim, False, label=str(dim))
    low = x.clone()
    low[:, :5] = float("-inf")
    low[1] = float("-inf")
    yield case(aten._safe_softmax.default, low, 1)
    yield case(aten._log_softmax.default, low[:1], 1, False, label="low")
    grad = r(3, 7, 5)
    yield case(aten._log_softmax_backward_data.default, grad, x.log_softmax(1), 1, F64)
    yield case(aten._softmax_backward_data.default, grad, x.softmax(1), 1, F64)


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
        yield case(forward, q, k, v, 0.0, causal, label=label, scale=0.3, **kwargs)
        out, rows = forward(q, k, v, 0.0, causal, scale=0.3, **kwargs)
        yield case(
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
    yield case(math, r(2, 4, 5, 8), r(2, 2, 6, 8), r(2, 2, 6, 8), label="grouped", enable_gqa=True)


def _losses() -> Iterator[Case]:
    x = (torch.arange(28, dtype=F64).view(4, 7) / 10).log_softmax(1)
    target = torch.tensor([0, 6, -100, 2])
    weight = torch.linspace(0.5, 1.5, 7, dtype=F64)
    for reduction in (0, 1, 2):
        for w in (None, weight):
            label = f"{reduction}{'w' if w is not None else ''}"
            args = (x, target, w, reduction, -100)
            yield case(aten.nll_loss_forward.default, *args, label=label)
            _, total = aten.nll_loss_forward.default(*args)
            grad = r(4) if reduction == 0 else r()
            yield case(aten.nll_loss_backward.default, grad, *args, total, label=label)
    ignored = torch.full((4,), 3)
    yield case(aten.nll_loss_forward.default, x, ignored, None, 1, 3, label="ignored")
    yield case(aten.nll_loss_forward.default, x[0], target[0], None, 1, -100, label="single")
    pixels, where = r(3, 4, 2, 5).log_softmax(1), ints(4, 3, 2, 5)
    yield case(aten.nll_loss2d_forward.default, pixels, where, None, 1, -100)
    for fn, rest in ((aten.mse_loss, ()), (aten.smooth_l1_loss, (1.0,)), (aten.huber_loss, (1.0,))):
        backward = getattr(aten, fn.__name__.rpartition(".")[-1] + "_backward").default
        for reduction in (0, 1, 2):
            label = str(reduction)
            yield case(fn.default, r(5, 3), r(3, 5).t(), reduction, *rest, label=label)
            grad = r(5, 3) if reduction == 0 else r()
            yield case(backward, grad, r(5, 3), r(3, 5).t(), reduction, *rest, label=label)


def _pooling() -> Iterator[Case]:
    image = r(3, 5, 6, 4)
    yield case(aten.avg_pool2d.default, image, [2, 2])
    yield case(
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
    yield case(aten._adaptive_avg_pool2d.default, image, [3, 2])
    yield case(aten.max_pool2d_with_indices.default, image, [2, 2])
    yield case(aten.upsample_bicubic2d.default, image, [9, 8], False)
    yield case(aten.upsample_bicubic2d_backward.default, r(3, 5, 9, 8), [9, 8], [3, 5, 6, 4], False)
    yield case(aten.upsample_bilinear2d.default, image, [9, 8], False)
