"""Rules of matrix products and convolutions.

A cut contracted factor leaves a pending sum. A bias joins that sum once: the local form adds it on
the first piece only (`graph/local/matmul.py`), so a row-parallel layer keeps its bias.
Spatial dims of a convolution are blocked; a patch embedding has nothing to gain there.
"""

from __future__ import annotations

from dataclasses import replace

from hyperparallel.shard.rules.notation import bind, parse
from hyperparallel.shard.rules.operands import (
    Builder,
    OpValues,
    argument,
    bind_given,
    in_shapes,
    line,
    out_shapes,
    present,
    uncut,
)
from hyperparallel.shard.rules.rule import OpFacts, Rule
from hyperparallel.workload.ops import Op

_PRODUCT = ((0,), (1,))
_ADDED = ((0, 1), (0, 2))


def _added(rest: str) -> Builder:
    """bias + a product; the bias broadcasts against the result."""
    dims = rest.partition("->")[2].split()

    def build(op: Op, values: OpValues) -> Rule:
        # The bias of fewer dims broadcasts from the right.
        ndim = len(values[op.inputs[0]].shape)
        pattern = parse(f"{' '.join(dims[len(dims) - ndim :])}, {rest}")
        return bind(pattern, in_shapes(op, values), out_shapes(op, values), linear=_ADDED)

    return build


def _convolution(op: Op, values: OpValues) -> Rule:
    """convolution(input, weight, bias?, stride, padding, dilation, transposed, _, groups)"""
    transposed, groups = argument(op, 6), argument(op, 8)
    if transposed:
        return uncut(op, values)
    spatial = len(values[op.inputs[0]].shape) - 2
    before, kernel, after = _spatial(spatial)
    text = f"n (g c) {before}, (g o) c {kernel}, (g o) -> n (g o) {after}"
    given = present(op, (0, 1, 2))
    return bind_given(op, values, text, given, ((0, 2), (1, 2)), groups)


def _convolution_backward(op: Op, values: OpValues) -> Rule:
    """convolution_backward(grad, input, weight, bias_sizes?, stride, ...) -> input, weight, bias"""
    transposed, groups = argument(op, 7), argument(op, 9)
    if transposed:
        return uncut(op, values)
    spatial = len(values[op.inputs[1]].shape) - 2
    before, kernel, after = _spatial(spatial)
    x, w = f"n (g c) {before}", f"(g o) c {kernel}"
    text = f"n (g o) {after}, {x}, {w} -> {x}, {w}, (g o)"
    return bind_given(op, values, text, [True] * 3, ((0,),), groups)


def _spatial(count: int) -> tuple[str, str, str]:
    before, kernel, after = (
        " ".join(f"[{letter}{i}]" for i in range(count)) for letter in ("x", "k", "y")
    )
    return before, kernel, after


RULES: dict[str, Builder] = {
    "aten.mm": line("m k, k n -> m n", _PRODUCT),
    "aten.bmm": line("b m k, b k n -> b m n", _PRODUCT),
    "aten.mv": line("m k, k -> m", _PRODUCT),
    "aten.dot": line("k, k -> ", _PRODUCT),
    "aten.vdot": line("k, k -> ", _PRODUCT),
    "aten.outer": line("m, n -> m n", _PRODUCT),
    "aten.addmm": _added("m k, k n -> m n"),
    "aten.baddbmm": _added("b m k, b k n -> b m n"),
    "aten.addmv": _added("m k, k -> m"),
    "aten.addr": _added("m, n -> m n"),
    "aten.linear": line("... k, o k, o -> ... o", ((0, 2), (1, 2)), at=(0, 1, 2)),
    "aten._grouped_mm": line("[t] k, [e] k n, [e] -> [t] n", _PRODUCT, at=(0, 1, 2)),
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}

_PLAIN = OpFacts(flops=2.0, orderless=True, fresh=True, group="matmul")
# The kernel is laid on every place of the result; which places of the input it meets there follows.
_CONVOLUTION = OpFacts(flops=2.0, not_looped=("x0", "x1", "x2"), group="matmul")
_VECTOR = OpFacts(fresh=True, group="matmul")
FACTS: dict[str, OpFacts] = {
    **dict.fromkeys(("aten.mm", "aten.bmm"), _PLAIN),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm"), replace(_PLAIN, in_place=(0,))),
    **dict.fromkeys(("aten.mv", "aten.addmv"), _VECTOR),
    "aten.dot": OpFacts(group="matmul"),
    "aten.linear": OpFacts(flops=2.0, group="matmul"),
    # Each row of t goes through the one expert that it is grouped under, not through all.
    "aten._grouped_mm": OpFacts(flops=2.0, not_looped=("e",), group="matmul"),
    "aten.convolution": _CONVOLUTION,
    "aten.convolution_backward": replace(_CONVOLUTION, flops=4.0),  # the gradients of input and weight
}
"""Products with a vector are bound by memory, so that their operations are not counted."""
