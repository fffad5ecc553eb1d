"""Rules of loss ops.

Both dims of nll_loss may be cut: each rank scores the targets of its rows that fall in its piece of
the classes. The local form then exchanges two numbers (`inside`): the sum of the losses, and of the
weights of the targets, by which a mean over the *whole* batch is divided. See
`graph/local/loss.py`.
"""

from __future__ import annotations

from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    InputGroups,
    OpValues,
    along,
    argument,
    empty_of,
    in_shapes,
)
from hyperparallel.shard.rules.rule import FactorDims, OpFacts, Rule
from hyperparallel.workload.ops import Op, Ref

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction`."""


def _nll(op: Op, values: OpValues) -> Rule:
    """nll_loss_forward(self, target, weight?, reduction, ignore_index) -> loss, total weight"""
    scores, _, sizes = _classes(values[op.inputs[0]].shape)
    target = _rows_of(scores)
    weight = (scores[1] if len(scores) > 1 else scores[0],)
    weighted = isinstance(argument(op, 2, "weight"), Ref)
    reduction = argument(op, 3, "reduction", MEAN)
    inputs = (scores, target) + ((weight,) if weighted else ())
    outputs: tuple[FactorDims, FactorDims] = (target if reduction == NONE else (), ())
    # One exchange of (sum of losses, sum of weights); with no reduction, of the losses.
    inside = dict.fromkeys(sizes, 4.0 if reduction != NONE else 0.0)
    if reduction == NONE and "c" in sizes:
        inside["c"] = 2.0
    # The loss is linear in the scores; the total weight, if anybody wants it, is not.
    linear: InputGroups = () if any(op.outputs[1:]) else ((0,),)
    return Rule(inputs, outputs, sizes, empty_of(sizes), linear=linear, inside=inside)


def _nll_backward(op: Op, values: OpValues) -> Rule:
    """nll_loss_backward(grad, self, target, weight?, reduction, ignore_index, total)"""
    scores, _, sizes = _classes(values[op.inputs[1]].shape)
    target = _rows_of(scores)
    weight = (scores[1] if len(scores) > 1 else scores[0],)
    reduction = argument(op, 4, "reduction", MEAN)
    grad: FactorDims = target if reduction == NONE else ()
    middle = (weight,) if isinstance(argument(op, 3, "weight"), Ref) else ()
    inputs = (grad, scores, target, *middle, ())
    return Rule(inputs, (scores,), sizes, empty_of(sizes), linear=((0,),))


def _classes(shape: tuple[int, ...]) -> tuple[FactorDims, int, dict[str, int]]:
    """Factors of n c (and what follows), or of c alone; the class factor is named c."""
    at = 1 if len(shape) > 1 else 0
    names = [LETTERS[i + 13] for i in range(len(shape))]
    names[at] = "c"
    dims, sizes = along(shape, tuple(names))
    return dims, at, sizes


def _rows_of(scores: FactorDims) -> FactorDims:
    return scores[:1] + scores[2:] if len(scores) > 1 else ()


def _elementwise(reduction_at: int, linear: InputGroups = ()) -> Builder:
    """A loss of two tensors of one shape, with a reduction argument."""

    def build(op: Op, values: OpValues) -> Rule:
        dims, sizes = along(values[op.inputs[0]].shape)
        reduction = argument(op, reduction_at, "reduction", MEAN)
        output = dims if reduction == NONE else ()
        count = len(op.inputs)
        return Rule((dims,) * count, (output,), sizes, empty_of(sizes), linear=linear)

    return build


def _elementwise_backward(op: Op, values: OpValues) -> Rule:
    """(grad, self, target, reduction): the gradient has no dims unless nothing was reduced."""
    shapes = in_shapes(op, values)
    dims, sizes = along(shapes[1])
    grad: FactorDims = dims if shapes[0] == shapes[1] else ((),) * len(shapes[0])
    rest = (dims,) * (len(shapes) - 1)
    return Rule((grad, *rest), (dims,), sizes, empty_of(sizes), linear=((0,),))


RULES: dict[str, Builder] = {
    "aten.nll_loss_forward": _nll,
    "aten.nll_loss2d_forward": _nll,
    "aten.nll_loss_backward": _nll_backward,
    "aten.nll_loss2d_backward": _nll_backward,
    "aten.mse_loss": _elementwise(2),
    "aten.smooth_l1_loss": _elementwise(2),
    "aten.huber_loss": _elementwise(2),
    "aten.soft_margin_loss": _elementwise(2),
    "aten.mse_loss_backward": _elementwise_backward,
    "aten.smooth_l1_loss_backward": _elementwise_backward,
    "aten.huber_loss_backward": _elementwise_backward,
    "aten.soft_margin_loss_backward": _elementwise_backward,
}

_LABELS = OpFacts(exchanges=1, scored=True, reduction_at=3, weight_at=2)
FACTS: dict[str, OpFacts] = {
    **dict.fromkeys(("aten.nll_loss_forward", "aten.nll_loss2d_forward"), _LABELS),
    **dict.fromkeys(
        ("aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.soft_margin_loss"),
        OpFacts(reduction_at=2),
    ),
}
