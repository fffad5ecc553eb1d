"""Rules of softmax and of layer, RMS, group and batch normalisation, forward and backward.

Softmax may be cut along its own dim: its local form exchanges a maximum and a sum per row
(`inside`), so a vocabulary-sharded loss never gathers the logits. Normalised dims are blocked; the
others are free, and the gradients of weights are pending sums over them.
"""

from __future__ import annotations

from dataclasses import replace

from hyperparallel.shard.rules.notation import Shape
from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    OpValues,
    along,
    argument,
    bind_given,
    empty_of,
    line,
    present,
)
from hyperparallel.shard.rules.rule import FactorDims, OpFacts, Rule
from hyperparallel.workload.ops import Op


def _softmax(dim_at: int, exchanges: int) -> Builder:
    """Softmax and its backward: `exchanges` all-reduces of one number per row if the dim is cut."""

    def build(op: Op, values: OpValues) -> Rule:
        shape = values[op.inputs[0]].shape
        dims, sizes = along(shape)
        inside = {}
        if shape:
            dim = argument(op, dim_at, "dim") % len(shape)
            if LETTERS[dim] in sizes:
                # Each exchange is an all-reduce, two trips, of one number where the output has shape[dim].
                inside[LETTERS[dim]] = 2.0 * exchanges / max(shape[dim], 1)
        # A gradient is linear in the gradient that comes in; softmax itself is linear in nothing.
        linear = ((0,),) if "backward" in op.target else ()
        count = len(op.inputs)
        return Rule((dims,) * count, (dims,), sizes, empty_of(sizes), linear=linear, inside=inside)

    return build


def _rows(shape: Shape, normalised: int) -> tuple[FactorDims, FactorDims, FactorDims, dict[str, int]]:
    """Dims of the whole, of the weight, of the statistics (size one where normalised), sizes."""
    dims, sizes = along(shape)
    cut = len(shape) - normalised
    return dims, dims[cut:], dims[:cut] + ((),) * normalised, sizes


def _layer_norm(op: Op, values: OpValues) -> Rule:
    """native_layer_norm, _fused_rms_norm: (input, shape, weight?, ...) -> out, statistics"""
    dims, weight, rows, sizes = _rows(values[op.inputs[0]].shape, len(argument(op, 1)))
    inputs = (dims,) + (weight,) * (len(op.inputs) - 1)
    outputs = (dims,) + (rows,) * (len(op.outputs) - 1)
    blocked = frozenset(name for dim in weight for name in dim)
    return Rule(inputs, outputs, sizes, blocked | empty_of(sizes))


def _layer_norm_backward(statistics: int) -> Builder:
    """(grad, input, shape, statistics..., weight?, bias?, mask) -> input, weight, bias"""

    def build(op: Op, values: OpValues) -> Rule:
        dims, weight, rows, sizes = _rows(values[op.inputs[0]].shape, len(argument(op, 2)))
        affine = len(op.inputs) - 2 - statistics
        inputs = (dims, dims) + (rows,) * statistics + (weight,) * affine
        outputs = (dims,) + (weight,) * (len(op.outputs) - 1)
        blocked = frozenset(name for dim in weight for name in dim)
        return Rule(inputs, outputs, sizes, blocked | empty_of(sizes), linear=((0,),))

    return build


def _group_norm(op: Op, values: OpValues) -> Rule:
    """native_group_norm(input, weight?, bias?, N, C, HxW, group, eps) -> out, mean, rstd"""
    given = present(op, (0, 1, 2))
    x = _channels(len(values[op.inputs[0]].shape))
    text = f"{x}, (g [c]), (g [c]) -> {x}, n g, n g"
    return bind_given(op, values, text, given, (), argument(op, 6))


def _group_norm_backward(op: Op, values: OpValues) -> Rule:
    """native_group_norm_backward(grad, input, mean, rstd, weight?, N, C, HxW, group, mask)"""
    given = present(op, (0, 1, 2, 3, 4))
    x = _channels(len(values[op.inputs[0]].shape))
    text = f"{x}, {x}, n g, n g, (g [c]) -> {x}, (g [c]), (g [c])"
    return bind_given(op, values, text, given, ((0,),), argument(op, 8))


def _channels(ndim: int) -> str:
    return "n (g [c])" + "".join(f" [x{i}]" for i in range(ndim - 2))


def _batch_norm(training_at: int | None, outputs: str) -> Builder:
    """Batch norm: channels are free; in training the statistics block every other dim.

    training_at: where the argument that says so stands; None for an op that never trains.
    """

    def build(op: Op, values: OpValues) -> Rule:
        given = present(op, (0, 1, 2, 3, 4))
        ndim = len(values[op.inputs[0]].shape)
        names = ["n", "c", *(f"x{i}" for i in range(ndim - 2))]
        training = training_at is not None and bool(argument(op, training_at, "training", True))
        # In training the mean is over batch and space, so that no piece of them has it.
        x = " ".join(f"[{n}]" if training and n != "c" else n for n in names)
        # In evaluation the saved statistics are empty, so what they are made of is not said.
        saved = outputs if training else " ".join(outputs.replace("c", "[s]").split())
        return bind_given(op, values, f"{x}, c, c, c, c -> {x}, {saved}", given)

    return build


def _batch_norm_backward(op: Op, values: OpValues) -> Rule:
    """native_batch_norm_backward(grad, input, weight?, mean?, var?, save_mean?, save_invstd?)"""
    given = present(op, (0, 1, 2, 3, 4, 5, 6))
    ndim = len(values[op.inputs[0]].shape)
    names = ["n", "c", *(f"x{i}" for i in range(ndim - 2))]
    training = bool(argument(op, 7, "train", True))
    x = " ".join(f"[{n}]" if training and n != "c" else n for n in names)
    saved = "c, c" if training else "[s], [s]"
    return bind_given(op, values, f"{x}, {x}, c, c, c, {saved} -> {x}, c, c", given, ((0,),))


RULES: dict[str, Builder] = {
    "aten._softmax": _softmax(1, 2),
    "aten._log_softmax": _softmax(1, 2),
    "aten._safe_softmax": _softmax(1, 2),
    "aten._softmax_backward_data": _softmax(2, 1),
    "aten._log_softmax_backward_data": _softmax(2, 1),
    "aten.native_layer_norm": _layer_norm,
    "aten.native_layer_norm_backward": _layer_norm_backward(2),
    "aten._fused_rms_norm": _layer_norm,
    "aten._fused_rms_norm_backward": _layer_norm_backward(1),
    "aten.native_group_norm": _group_norm,
    "aten.native_group_norm_backward": _group_norm_backward,
    "aten.native_batch_norm": _batch_norm(5, "c, c"),
    "aten._native_batch_norm_legit": _batch_norm(5, "c, c"),
    "aten._native_batch_norm_legit_functional": _batch_norm(5, "c, c, c, c"),
    "aten._native_batch_norm_legit_no_training": _batch_norm(None, "c, c"),
    "aten.native_batch_norm_backward": _batch_norm_backward,
    "aten.pixel_shuffle": line("... [c] [h] [w] -> ... [o] [y] [x]", ((0,),), reduce=None),
}

_NORM = OpFacts(group="normalisation")
FACTS: dict[str, OpFacts] = {
    **{name: _NORM for name in RULES if "norm" in name},
    **{name: replace(_NORM, fresh=True) for name in RULES if "softmax" in name},
    "aten._log_softmax": replace(_NORM, fresh=True, scored=True),
    "aten._log_softmax_backward_data": replace(_NORM, fresh=True, scored=True, exchanges=1),
    "aten._softmax_backward_data": replace(_NORM, fresh=True, exchanges=1),
}
