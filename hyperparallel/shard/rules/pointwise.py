"""Rules of pointwise ops: one factor per dim of the result, operands aligned at the right.

What differs between them is only through which operands a pending sum passes: `each` (mul): every
tensor operand by itself; `joint` (add): all of them together, and no constant but zero may join;
`first` (neg, the gradient of every `*_backward` that is linear in it): the first; `never` (exp, add
of a constant). Comparison, logical and bitwise ops are `never`.
"""

from __future__ import annotations

from functools import lru_cache

from hyperparallel.shard.rules.notation import Shape
from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    InputGroups,
    OpValues,
    argument,
    empty_of,
    in_shapes,
    uncut,
)
from hyperparallel.shard.rules.rule import FactorDims, OpFacts, Rule
from hyperparallel.workload.ops import Op, Ref

_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
_PRECISION |= {"complex32": 11, "complex64": 24, "complex128": 53}
"""Bits of significand; a cast between these is linear if it keeps them."""


@lru_cache(maxsize=8192)
def broadcasting(
    inputs: tuple[Shape, ...], output: Shape, linear: InputGroups = (), count: int = 1
) -> Rule:
    """The rule of a pointwise op with `count` results of one shape.

    >>> broadcasting(((8, 1), (4,)), (8, 4)).inputs
    ((('a',), ()), (('b',),))
    """
    sizes = {LETTERS[i]: size for i, size in enumerate(output) if size != 1}

    def dims(shape: Shape) -> FactorDims:
        # Aligned at the right.
        skip = len(output) - len(shape)
        return tuple((LETTERS[skip + i],) if size != 1 else () for i, size in enumerate(shape))

    return Rule(
        inputs=tuple(dims(shape) for shape in inputs),
        outputs=(dims(output),) * count,
        sizes=sizes,
        blocked=empty_of(sizes),
        linear=linear,
    )


def _build(op: Op, values: OpValues, linear: InputGroups) -> Rule:
    output = values[next(name for name in op.outputs if name is not None)].shape
    inputs = tuple(in_shapes(op, values))
    if not all(_fits(shape, output) for shape in inputs):
        return uncut(op, values)
    return broadcasting(inputs, output, linear, len(op.outputs))


@lru_cache(maxsize=8192)
def _fits(shape: Shape, output: Shape) -> bool:
    """Whether `shape` broadcasts to `output`; some backends pass empty stand-ins for buffers."""
    return len(shape) <= len(output) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(output), strict=False)
    )


def never(op: Op, values: OpValues) -> Rule:
    """exp, add of a constant: no pending sum passes."""
    return _build(op, values, ())


def first(op: Op, values: OpValues) -> Rule:
    """neg, silu_backward: linear in the first operand."""
    return _build(op, values, ((0,),))


def each(op: Op, values: OpValues) -> Rule:
    """mul: linear in every tensor operand by itself."""
    return _build(op, values, tuple((i,) for i in range(len(op.inputs))))


def joint(op: Op, values: OpValues) -> Rule:
    """add, sub: linear in all tensors together, unless a constant other than zero is added."""
    constants = [a for a in op.args[:2] if not isinstance(a, Ref)]
    # Every rank would add it to its summand: n times in all.
    if any(constant != 0 for constant in constants):
        return _build(op, values, ())
    return _build(op, values, (tuple(range(len(op.inputs))),))


def groups(*linear: tuple[int, ...]) -> Builder:
    """A pointwise op with the given linear groups."""
    return lambda op, values: _build(op, values, linear)


def _divide(op: Op, values: OpValues) -> Rule:
    # A rounded sum is not the sum of what was rounded; and 1 / x is not linear in x.
    rounded = op.kwargs.get("rounding_mode") is not None
    numerator = isinstance(op.args[0], Ref)
    return _build(op, values, ((0,),) if numerator and not rounded else ())


def _power(op: Op, values: OpValues) -> Rule:
    exponent = argument(op, 1, "exponent")
    return _build(op, values, ((0,),) if exponent == 1 else ())


def _where(op: Op, values: OpValues) -> Rule:
    """where(condition, a, b): linear in a and b together; a constant other than zero breaks it."""
    if len(op.args) < 3:
        return uncut(op, values)
    constants = [a for a in op.args[1:3] if not isinstance(a, Ref)]
    tensors = tuple(range(1, len(op.inputs)))
    # The condition stays whole: it picks the same side of every summand.
    return _build(op, values, (tensors,) if tensors and not any(constants) else ())


def _masked_fill(op: Op, values: OpValues) -> Rule:
    value = argument(op, 2, "value")
    if isinstance(value, Ref):
        return _build(op, values, ((0, 2),))
    return _build(op, values, ((0,),) if value == 0 else ())


def _cast(op: Op, values: OpValues) -> Rule:
    before = _PRECISION.get(values[op.inputs[0]].dtype)
    after = [_PRECISION.get(values[name].dtype) for name in op.outputs if name is not None]
    # To fewer bits each summand would be rounded by itself, before the sum.
    exact = before is not None and all(bits is not None and bits >= before for bits in after)
    same = all(values[n].dtype == values[op.inputs[0]].dtype for n in op.outputs if n is not None)
    return _build(op, values, ((0,),) if exact or same else ())


def _table(builder: Builder, names: str) -> dict[str, Builder]:
    return {f"aten.{name}": builder for name in names.split()}


RULES: dict[str, Builder] = {
    **_table(
        first,
        """neg negative clone detach detach_ alias lift_fresh lift_fresh_copy lift conj _conj
        _conj_physical resolve_conj resolve_neg positive contiguous real imag deg2rad rad2deg
        silu_backward gelu_backward tanh_backward sigmoid_backward threshold_backward
        leaky_relu_backward elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward
        softplus_backward mish_backward log_sigmoid_backward native_dropout_backward
        infinitely_differentiable_gelu_backward rrelu_with_noise_backward logit_backward
        _masked_scale softshrink_backward hardshrink_backward nan_to_num_backward""",
    ),
    **_table(each, "mul multiply"),
    **_table(joint, "add sub subtract rsub"),
    **_table(_divide, "div divide true_divide"),
    **_table(_power, "pow"),
    **_table(_where, "where"),
    **_table(_masked_fill, "masked_fill"),
    **_table(_cast, "_to_copy to type_as"),
    **_table(groups((0, 1), (0, 2)), "addcmul"),
    **_table(groups((0, 1)), "addcdiv lerp complex"),
    **_table(groups((1,)), "copy"),
    **_table(never, "max.other min.other"),
    **_table(
        never,
        """abs absolute exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan
        sinh cosh tanh asin acos atan asinh acosh atanh atan2 erf erfc erfinv sigmoid logit relu
        relu6 silu gelu elu selu celu mish softplus hardtanh hardswish hardsigmoid leaky_relu
        threshold log_sigmoid_forward softshrink hardshrink ceil floor round trunc fix frac sign sgn
        signbit clamp clamp_min clamp_max clip maximum minimum fmax fmin hypot remainder fmod
        floor_divide float_power eq ne lt le gt ge  isnan isinf isfinite isposinf isneginf isclose
        logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
        bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__
        __rshift__ zeros_like ones_like full_like empty_like fill zero xlogy special_xlog1py lgamma
        digamma polygamma sinc i0 special_i0 special_i1 logaddexp logaddexp2 nextafter heaviside
        copysign ldexp angle polar nan_to_num special_expit special_erf
        special_ndtri special_log_ndtr special_entr gcd lcm""",
    ),
}

_UNARY = ("neg", "rsqrt", "exp", "sigmoid", "tanh", "sqrt", "reciprocal")
_FRESH = (
    *("silu", "gelu", "relu", "pow"),
    *("silu_backward", "gelu_backward", "tanh_backward", "threshold_backward"),
)
FACTS: dict[str, OpFacts] = {
    **dict.fromkeys(("aten.alias", "aten.detach"), OpFacts(view=True, same_elements=True, group="view")),
    "aten.clone": OpFacts(orderless=True, fresh=True),
    **{f"aten.{name}": OpFacts(fresh=True, in_place=(0,)) for name in (*_UNARY, "addcmul")},
    **{f"aten.{name}": OpFacts(fresh=True) for name in (*_FRESH, "add", "sub")},
    **{f"aten.{name}": OpFacts(fresh=True, scales=True) for name in ("mul", "div")},
    "aten.add.Tensor": OpFacts(fresh=True, in_place=(0, 1)),
    "aten.sub.Tensor": OpFacts(fresh=True, in_place=(0,)),
    "aten.mul.Tensor": OpFacts(fresh=True, in_place=(0, 1), scales=True),
    "aten.div.Tensor": OpFacts(fresh=True, in_place=(0,), scales=True),
}
