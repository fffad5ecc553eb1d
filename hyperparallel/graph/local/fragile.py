"""Local forms for kernels that cannot stand an empty or a strided operand.

A rank may hold an empty piece of the batch, of heads or of channels. Fused attention and batch norm
then end the process with a floating point exception, convolution, pooling and the backward of the
fused RMS norm raise. Zeros are right for them all: what an empty piece adds to a pending sum is
nothing, and other results are empty themselves.

A rank may also hold a slice, which is not contiguous. The backward of layer norm reads its mean and
rstd as if they were, and returns wrong gradients without a word. Both were seen on torch 2.13, CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperparallel.graph.local.local_op import LocalOp, contiguous
from hyperparallel.shard.rules import attention, pooling

Form = Callable[[LocalOp], tuple[Any, ...]]


def _contiguous_at(local: LocalOp, positions: tuple[int, ...]) -> tuple[Any, ...]:
    args = list(local.args)
    for i in positions:
        args[i] = local.emit(contiguous, args[i])
    return tuple(args)


def _strict(*positions: int) -> Form:
    """An op that reads the operands at these positions as if they were contiguous."""
    return lambda local: local.call_guarded(
        # Uncut operands are those of one device, and as contiguous as there.
        _contiguous_at(local, positions) if local.pieces else local.args
    )


_WIDE = {1: None}
"""The log-sum-exp of attention is kept in single precision at least."""


def _attention(local: LocalOp) -> tuple[Any, ...]:
    return local.call_guarded(dtypes=_WIDE)


def _indexed(local: LocalOp) -> tuple[Any, ...]:
    return local.call_guarded(dtypes={1: torch.int64})


def _resized(local: LocalOp) -> tuple[Any, ...]:
    """upsample backward: (grad, output_size, input_size, ...)"""
    return local.call_guarded(local.with_argument(2, list(local.output_shape())))


FORMS: dict[str, Form] = {
    **dict.fromkeys(pooling.RULES, LocalOp.call_guarded),
    **dict.fromkeys(attention.RULES, _attention),
    # After the line for all of pooling: these also have a size in their arguments.
    **{name: _resized for name in pooling.RULES if "upsample" in name and "backward" in name},
    "aten.max_pool2d_with_indices": _indexed,
    **dict.fromkeys(
        (
            "aten.native_batch_norm",
            "aten._native_batch_norm_legit",
            "aten._native_batch_norm_legit_functional",
            "aten._native_batch_norm_legit_no_training",
            "aten.native_batch_norm_backward",
        ),
        LocalOp.call_guarded,
    ),
    "aten.native_layer_norm_backward": _strict(3, 4),
    "aten._fused_rms_norm_backward": _strict(3),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _strict(5),
    "aten._scaled_dot_product_flash_attention_backward": _strict(5),
    "aten._scaled_dot_product_cudnn_attention_backward": _strict(5),
    "aten._scaled_dot_product_efficient_attention_backward": _strict(6),
}
