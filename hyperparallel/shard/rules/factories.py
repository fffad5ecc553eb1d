"""Rules of ops that make tensors out of shapes or random numbers.

Every dim of the result is a factor that may be cut: the local form makes only its piece (`arange`
with an offset). Random ops draw the whole tensor from the shared generator state and keep their
piece, so that numbers depend on the element, not on the mesh. `new_*` ops take a tensor only for
its dtype and device: it may be cut, and the result is whole all the same.
"""

from __future__ import annotations

from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    OpValues,
    along,
    empty_of,
    in_shapes,
    out_shapes,
    uncut,
)
from hyperparallel.shard.rules.pointwise import never
from hyperparallel.shard.rules.rule import OpFacts, Rule
from hyperparallel.workload.ops import Op


def _made(op: Op, values: OpValues) -> Rule:
    """zeros, full, arange, rand: no operands."""
    (shape,) = out_shapes(op, values)
    assert shape is not None
    dims, sizes = along(shape)
    return Rule((), (dims,), sizes, empty_of(sizes))


def _like_type(op: Op, values: OpValues) -> Rule:
    """new_zeros(x, size): x gives dtype and device only, so cutting it leaves whole results."""
    (shape,) = out_shapes(op, values)
    assert shape is not None
    dims, sizes = along(shape)
    given, unused = along(in_shapes(op, values)[0], tuple(f"x{c}" for c in LETTERS))
    every = sizes | unused
    return Rule((given,), (dims,), every, empty_of(every), inside=dict.fromkeys(unused, 0.0))


# Each random op stands in one of these; the local forms (`graph/local/random.py`) are given to them by list.
DRAWN = ("aten.rand", "aten.randn", "aten.randint", "aten.normal.float_float")
DRAWN_LIKE = (
    "aten.rand_like",
    "aten.randn_like",
    "aten.randint_like",
    "aten.bernoulli.p",
    "aten.normal_functional",
    "aten.uniform",
    "aten.exponential",
    "aten.log_normal",
    "aten.geometric",
    "aten.cauchy",
    "aten.random",
    "aten.native_dropout",
)
# The numbers drawn depend on the other operand element by element, or on each other.
DRAWN_WHOLE = (
    "aten.bernoulli",
    "aten.bernoulli.Tensor",
    "aten.normal",
    "aten.poisson",
    "aten.randperm",
    "aten.multinomial",
    "aten.binomial",
    "aten.dropout",
    "aten.rrelu_with_noise_functional",
)

_DRAWS_BY_VALUE = ("poisson", "multinomial", "binomial", "rrelu_with_noise_functional")

FACTS: dict[str, OpFacts] = {
    **dict.fromkeys((*DRAWN, *DRAWN_LIKE, *DRAWN_WHOLE), OpFacts(random=True)),
    **{f"aten.{name}": OpFacts(random=True, draws_by_value=True) for name in _DRAWS_BY_VALUE},
    "aten.native_dropout": OpFacts(random=True, group="elementwise"),
}

RULES: dict[str, Builder] = {
    **dict.fromkeys(
        [
            "aten.arange",
            "aten.zeros",
            "aten.ones",
            "aten.full",
            "aten.empty",
            "aten.empty_strided",
            "aten.empty_permuted",
            "aten.scalar_tensor",
            "aten.linspace",
            "aten.eye",
            "aten._efficientzerotensor",
        ],
        _made,
    ),
    **dict.fromkeys(DRAWN, _made),
    **dict.fromkeys(DRAWN_LIKE, never),
    **dict.fromkeys(DRAWN_WHOLE, uncut),
    **dict.fromkeys(("aten.tril_indices", "aten.triu_indices"), uncut),
    # Checks of what a program assumes: no results, and they look at whole tensors.
    **dict.fromkeys(("aten._assert_async", "aten._assert_tensor_metadata"), uncut),
    **dict.fromkeys(
        [
            "aten.new_zeros",
            "aten.new_ones",
            "aten.new_full",
            "aten.new_empty",
            "aten.new_empty_strided",
        ],
        _like_type,
    ),
}
