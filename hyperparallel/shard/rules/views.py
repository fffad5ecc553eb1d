"""Rules of ops that rearrange elements: views, permutations, repeats.

A view is a merge and split of factors. `factorise` finds the finest factors that the shapes before
and after have in common, walking both from the outermost dim and taking greatest common divisors:
[2, 16, 64] -> [32, 64] is (b s h) -> ((b s) h). Where sizes share no divisor (3 x 8 -> 4 x 6 in the
middle), the elements of one dim spread over several others: those factors are blocked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd, prod

from hyperparallel.shard.rules.notation import Shape
from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    OpValues,
    along,
    argument,
    empty_of,
    line,
    uncut,
)
from hyperparallel.shard.rules.rule import OpFacts, Rule
from hyperparallel.workload.ops import Op, Ref

_LINEAR = ((0,),)


@lru_cache(maxsize=8192)
def factorise(source: Shape, target: Shape) -> Rule:
    """The rule of a view from one shape to another with as many elements.

    >>> rule = factorise((2, 16, 64), (32, 64))
    >>> rule.inputs, rule.outputs
    (((('a',), ('b',), ('c',)),), ((('a', 'b'), ('c',)),))
    """
    sizes: dict[str, int] = {}
    blocked: set[str] = set()
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]

    def add(size: int, *dims: list[str], block: bool = False) -> None:
        if size != 1:
            name = LETTERS[len(sizes)]
            sizes[name] = size
            for dim in dims:
                dim.append(name)
            if block:
                blocked.add(name)

    # Not a view after all, or nothing to cut: every dim blocked is always right.
    if prod(source) != prod(target) or 0 in source:
        for shape, dims in ((source, left), (target, right)):
            for size, dim in zip(shape, dims, strict=True):
                add(size, dim, block=True)
        return _view(left, right, sizes, blocked)

    i = j = -1
    m = n = 1
    while True:
        # A dim of size one is made of no factor.
        while m == 1 and i + 1 < len(source):
            i, m = i + 1, source[i + 1]
        while n == 1 and j + 1 < len(target):
            j, n = j + 1, target[j + 1]
        if m == 1 or n == 1:
            break
        # The largest factor that both dims begin with: a cut of it falls between the same elements on both
        # sides.
        shared = gcd(m, n)
        if shared > 1:
            add(shared, left[i], right[j])
            m, n = m // shared, n // shared
            continue
        # No common divisor: take more dims until both runs hold as many elements, and block what lies
        # between.
        before, after = [(i, m)], [(j, n)]
        while m != n:
            if m < n:
                i += 1
                m *= source[i]
                before.append((i, source[i]))
            else:
                j += 1
                n *= target[j]
                after.append((j, target[j]))
        # What both runs end with lies alike on both sides: 3 x 8 -> 4 x 6 may be cut inside by 2.
        tail = gcd(before[-1][1], after[-1][1])
        for run, dims in ((before, left), (after, right)):
            for place, (k, size) in enumerate(run):
                add(size // tail if place == len(run) - 1 else size, dims[k], block=True)
        add(tail, left[i], right[j])
        m = n = 1
    return _view(left, right, sizes, blocked)


def _view(
    left: list[list[str]], right: list[list[str]], sizes: dict[str, int], blocked: set[str]
) -> Rule:
    before, after = (tuple(tuple(dim) for dim in side) for side in (left, right))
    return Rule((before,), (after,), sizes, blocked=frozenset(blocked), linear=_LINEAR)


def _reshape(op: Op, values: OpValues) -> Rule:
    output = op.outputs[0]
    assert output is not None
    return factorise(values[op.inputs[0]].shape, values[output].shape)


@lru_cache(maxsize=8192)
def mapped(source: Shape, order: tuple[int | None, ...], target: Shape) -> Rule:
    """Dim i of the result is dim `order[i]` of the operand, or new (None)."""
    dims, sizes = along(source)
    after: list[tuple[str, ...]] = []
    for i, (origin, size) in enumerate(zip(order, target, strict=True)):
        if origin is not None and source[origin] == size:
            after.append(dims[origin])
        elif size == 1:
            after.append(())
        else:
            name = LETTERS[len(source) + i]
            sizes[name] = size
            after.append((name,))
    used = {name for dim in after for name in dim}
    # A dim that was selected away may not be cut: one rank alone would have what is asked for.
    lost = frozenset(name for name in sizes if name not in used)
    return Rule((dims,), (tuple(after),), sizes, empty_of(sizes) | lost, linear=_LINEAR)


def reordered(op: Op, values: OpValues, order: list[int | None]) -> Rule:
    """The rule of an op whose result has its operand's dims in this order (None: new)."""
    output = op.outputs[0]
    assert output is not None
    return mapped(values[op.inputs[0]].shape, tuple(order), values[output].shape)


def _transpose(op: Op, values: OpValues) -> Rule:
    ndim = len(values[op.inputs[0]].shape)
    order: list[int | None] = list(range(ndim))
    if ndim:
        a, b = argument(op, 1, "dim0", -1) % ndim, argument(op, 2, "dim1", -2) % ndim
        order[a], order[b] = order[b], order[a]
    return reordered(op, values, order)


def _t(op: Op, values: OpValues) -> Rule:
    return reordered(op, values, list(reversed(range(len(values[op.inputs[0]].shape)))))


def _permute(op: Op, values: OpValues) -> Rule:
    dims = argument(op, 1, "dims")
    return reordered(op, values, [d % len(dims) for d in dims])


def _movedim(op: Op, values: OpValues) -> Rule:
    ndim = len(values[op.inputs[0]].shape)
    moves = [argument(op, 1, "source"), argument(op, 2, "destination")]
    source, target = ([m % ndim] if isinstance(m, int) else [d % ndim for d in m] for m in moves)
    order: list[int | None] = [None] * ndim
    for a, b in zip(source, target, strict=True):
        order[b] = a
    others = iter(d for d in range(ndim) if d not in source)
    return reordered(op, values, [next(others) if d is None else d for d in order])


def _expand(op: Op, values: OpValues) -> Rule:
    ndim = len(values[op.inputs[0]].shape)
    output = op.outputs[0]
    assert output is not None
    new = len(values[output].shape) - ndim
    return reordered(op, values, [None] * new + list(range(ndim)))


def _repeat(op: Op, values: OpValues) -> Rule:
    """repeat: dim n becomes (r n), r outermost."""
    shape, repeats = values[op.inputs[0]].shape, argument(op, 1, "repeats")
    dims, sizes = along(shape)
    new = len(repeats) - len(shape)
    after = []
    for i, count in enumerate(repeats):
        inner = dims[i - new] if i >= new else ()
        if count != 1:
            sizes[f"r{i}"] = count
            inner = (f"r{i}", *inner)
        after.append(inner)
    return Rule((dims,), (tuple(after),), sizes, empty_of(sizes), linear=_LINEAR)


def _repeat_interleave(op: Op, values: OpValues) -> Rule:
    """repeat_interleave by one number along one dim: n becomes (n r)."""
    shape, count, dim = (
        values[op.inputs[0]].shape,
        argument(op, 1, "repeats"),
        argument(op, 2, "dim"),
    )
    if isinstance(count, Ref) or dim is None:
        return uncut(op, values)
    dims, sizes = along(shape)
    after = list(dims)
    if count != 1:
        sizes["r"] = count
        after[dim % len(shape)] += ("r",)
    return Rule((dims,), (tuple(after),), sizes, empty_of(sizes), linear=_LINEAR)


RULES: dict[str, Builder] = {
    **dict.fromkeys(
        (
            "aten.view",
            "aten._unsafe_view",
            "aten.reshape",
            "aten._reshape_alias",
            "aten.squeeze",
            "aten.unsqueeze",
            "aten.flatten",
            "aten.unflatten",
            "aten._reshape_copy",
            "aten.view_copy",
            "aten.squeeze_copy",
            "aten.unsqueeze_copy",
        ),
        _reshape,
    ),
    "aten.view.dtype": uncut,
    "aten.transpose": _transpose,
    "aten.t": _t,
    "aten.numpy_T": _t,
    "aten.permute": _permute,
    "aten.movedim": _movedim,
    "aten.expand": _expand,
    "aten.expand_copy": _expand,
    "aten.broadcast_to": _expand,
    "aten.repeat": _repeat,
    "aten.repeat_interleave": uncut,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.as_strided": uncut,
    "aten.view_as_complex": line("... [c] -> ...", _LINEAR, reduce=None),
    "aten.view_as_real": line("... -> ... [c]", _LINEAR, reduce=None),
}

_LOOK = OpFacts(view=True, orderless=True, group="view")
FACTS: dict[str, OpFacts] = {
    **dict.fromkeys(
        ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.transpose", "aten.t", "aten.permute",
         "aten.unsqueeze", "aten.squeeze"),
        replace(_LOOK, same_elements=True),
    ),
    "aten.expand": _LOOK,
}  # fmt: skip
