"""Rules of reductions, and of ops that work along one dim (scan, sort, top-k).

A sum over a cut dim leaves a pending sum, amax a pending max. Norms may be cut too, since their local form
exchanges one number per result (`inside`), variances and log-sum-exp with two one after the other: a mean or
maximum first, then a sum. Scans, sorts and everything that returns positions block their dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hyperparallel.shard.rules.notation import Shape
from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    InputGroups,
    OpValues,
    along,
    argument,
    empty_of,
)
from hyperparallel.shard.rules.rule import FactorDims, OpFacts, Rule
from hyperparallel.workload.ops import Op

_LINEAR: InputGroups = ((0,),)


@lru_cache(maxsize=8192)
def reduced(
    shape: Shape,
    dims: tuple[int, ...],
    keep: bool,
    count: int,
    linear: InputGroups,
    reduce: str | None,
    inside: float | None,
    block: bool,
) -> Rule:
    """The rule of a reduction of `shape` over `dims` (all, if empty) with `count` results.

    >>> reduced((8, 4), (1,), False, 1, (), "sum", None, False).outputs
    ((('a',),),)
    """
    before, sizes = along(shape)
    # No dims means all, as in torch.
    gone = {d % len(shape) for d in dims} if dims else set(range(len(shape)))
    after: FactorDims = tuple(
        () if i in gone else dim for i, dim in enumerate(before) if keep or i not in gone
    )
    # The factors that no output has: cut, they leave a pending reduction, or the local form finishes it.
    lost = {LETTERS[i] for i in gone} & set(sizes)
    return Rule(
        inputs=(before,),
        outputs=(after,) * count,
        sizes=sizes,
        blocked=empty_of(sizes) | (frozenset(lost) if block or reduce is None else frozenset()),
        reduce=reduce,
        linear=linear,
        inside=None if inside is None else dict.fromkeys(sorted(lost), inside),
    )


def reduction(
    dims_at: int | None,
    keep_at: int | None = None,
    linear: InputGroups = (),
    reduce: str | None = "sum",
    inside: float | None = None,
    block: bool = False,
) -> Builder:
    """A builder for a reduction whose dims and keepdim stand at these argument positions."""

    def build(op: Op, values: OpValues) -> Rule:
        dims = None if dims_at is None else argument(op, dims_at, "dim")
        dims = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
        keep = keep_at is not None and bool(argument(op, keep_at, "keepdim", False))
        shape = values[op.inputs[0]].shape
        return reduced(shape, dims, keep, len(op.outputs), linear, reduce, inside, block)

    return build


def scan(
    dim_at: int, linear: InputGroups = (), default: int = -1, count_changes: bool = False
) -> Builder:
    """An op along one dim, which is blocked; `count_changes` if it returns fewer (top-k)."""

    def build(op: Op, values: OpValues) -> Rule:
        shape = values[op.inputs[0]].shape
        if not shape:
            return Rule(((),), ((),) * len(op.outputs), {}, linear=linear)
        dim = argument(op, dim_at, "dim", default)
        dim = (default if dim is None else dim) % len(shape)
        dims, sizes = along(shape)
        after = dims
        blocked = {LETTERS[dim]} & set(sizes)
        if count_changes:
            kept = argument(op, 1, "k")
            after = (*dims[:dim], ("k",) if kept != 1 else (), *dims[dim + 1 :])
            if kept != 1:
                sizes["k"] = kept
                blocked.add("k")
        return Rule(
            (dims,),
            (after,) * len(op.outputs),
            sizes,
            frozenset(blocked) | empty_of(sizes),
            None,
            linear,
        )

    return build


_ROUND_TRIP = 2.0
"""An all-reduce of one number per result moves about twice the result through each rank."""
_TWO_TRIPS = 2 * _ROUND_TRIP

# `correction` and `keepdim` of these overloads are passed by keyword: there is no such position.
_KEYWORD_ONLY = 99

RULES: dict[str, Builder] = {
    "aten.sum.default": reduction(None, linear=_LINEAR),
    "aten.sum.dim_IntList": reduction(1, 2, _LINEAR),
    "aten.nansum": reduction(1, 2),
    "aten.count_nonzero.default": reduction(None),
    "aten.count_nonzero.dim_IntList": reduction(1),
    "aten.mean.default": reduction(None, linear=_LINEAR),
    "aten.mean.dim": reduction(1, 2, _LINEAR),
    "aten.amax": reduction(1, 2, reduce="max"),
    "aten.amin": reduction(1, 2, reduce="min"),
    "aten.max.default": reduction(None, reduce="max"),
    "aten.min.default": reduction(None, reduce="min"),
    "aten.any.default": reduction(None, reduce="max"),
    "aten.any.dim": reduction(1, 2, reduce="max"),
    "aten.any.dims": reduction(1, 2, reduce="max"),
    "aten.all.default": reduction(None, reduce="min"),
    "aten.all.dim": reduction(1, 2, reduce="min"),
    "aten.all.dims": reduction(1, 2, reduce="min"),
    "aten.prod.default": reduction(None, reduce="prod"),
    "aten.prod.dim_int": reduction(1, 2, reduce="prod"),
    "aten.var.default": reduction(None, inside=_TWO_TRIPS),
    "aten.var.dim": reduction(1, 3, inside=_TWO_TRIPS),
    "aten.var.correction": reduction(1, _KEYWORD_ONLY, inside=_TWO_TRIPS),
    "aten.var_mean.default": reduction(None, inside=_TWO_TRIPS),
    "aten.var_mean.dim": reduction(1, 3, inside=_TWO_TRIPS),
    "aten.var_mean.correction": reduction(1, _KEYWORD_ONLY, inside=_TWO_TRIPS),
    "aten.std.default": reduction(None, inside=_TWO_TRIPS),
    "aten.std.dim": reduction(1, 3, inside=_TWO_TRIPS),
    "aten.std.correction": reduction(1, _KEYWORD_ONLY, inside=_TWO_TRIPS),
    # No local form makes both results: their dims are blocked.
    "aten.std_mean.default": reduction(None, block=True),
    "aten.std_mean.dim": reduction(1, 3, block=True),
    "aten.std_mean.correction": reduction(1, _KEYWORD_ONLY, block=True),
    "aten.linalg_vector_norm": reduction(2, 3, inside=_ROUND_TRIP),
    "aten.norm.Scalar": reduction(None, inside=_ROUND_TRIP),
    "aten.norm.ScalarOpt_dim": reduction(2, 3, inside=_ROUND_TRIP),
    "aten.logsumexp": reduction(1, 2, inside=_TWO_TRIPS),
    # Positions count from the first element of the whole, and ties go to the first.
    "aten.argmax": reduction(1, 2, block=True),
    "aten.argmin": reduction(1, 2, block=True),
    "aten.max.dim": reduction(1, 2, block=True),
    "aten.min.dim": reduction(1, 2, block=True),
    "aten.median.default": reduction(None, block=True),
    "aten.median.dim": reduction(1, 2, block=True),
    "aten.nanmedian.dim": reduction(1, 2, block=True),
    "aten.mode": reduction(1, 2, block=True),
    "aten.kthvalue": reduction(2, 3, block=True),
    "aten.cumsum": scan(1, _LINEAR),
    "aten.cumprod": scan(1),
    "aten.logcumsumexp": scan(1),
    "aten.cummax": scan(1),
    "aten.cummin": scan(1),
    "aten.sort": scan(1),
    "aten.sort.stable": scan(2),
    "aten.argsort": scan(1),
    "aten.argsort.stable": scan(2),
    "aten.topk": scan(2, count_changes=True),
}

_REDUCTION = OpFacts(group="reduction")
_SUM, _MEAN = replace(_REDUCTION, fresh=True), replace(_REDUCTION, fresh=True, averages=True)
FACTS: dict[str, OpFacts] = {
    **dict.fromkeys(RULES, _REDUCTION),
    **dict.fromkeys(("aten.sum.default", "aten.sum.dim_IntList"), _SUM),
    **dict.fromkeys(("aten.mean.default", "aten.mean.dim"), _MEAN),
    **dict.fromkeys([name for name in RULES if "norm" in name], replace(_REDUCTION, exchanges=1)),
}
