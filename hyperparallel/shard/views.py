"""Rules of ops that rearrange elements: views, permutations, slices, joins.

A view is a merge and split of factors. `factorise` finds the finest factors that the shapes before
and after have in common, walking both from the outermost dim and taking greatest common divisors:
[2, 16, 64] -> [32, 64] is (b s h) -> ((b s) h). Where sizes share no divisor (3 x 8 -> 4 x 6 in the
middle), the elements of one dim spread over several others: those factors are blocked.

A slice, split, join or stack along a dim blocks that dim. Only if the pieces are equal does the dim
become ((part) inner) with `inner` free: fused projections cut in equal thirds stay cut.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod

from hyperparallel.shard.notation import Shape
from hyperparallel.shard.operands import (
    LETTERS,
    Builder,
    Values,
    along,
    argument,
    empty_of,
    in_shapes,
    line,
    out_shapes,
    whole,
)
from hyperparallel.shard.rule import Rule
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

    if prod(source) != prod(target) or 0 in source:
        for shape, dims in ((source, left), (target, right)):
            for size, dim in zip(shape, dims, strict=True):
                add(size, dim, block=True)
        return _view(left, right, sizes, blocked)

    i = j = -1
    m = n = 1
    while True:
        while m == 1 and i + 1 < len(source):
            i, m = i + 1, source[i + 1]
        while n == 1 and j + 1 < len(target):
            j, n = j + 1, target[j + 1]
        if m == 1 or n == 1:
            break
        shared = gcd(m, n)
        if shared > 1:
            add(shared, left[i], right[j])
            m, n = m // shared, n // shared
            continue
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


def _reshape(op: Op, values: Values) -> Rule:
    output = op.outputs[0]
    assert output is not None
    return factorise(values[op.inputs[0]].shape, values[output].shape)


@lru_cache(maxsize=8192)
def _mapped(source: Shape, order: tuple[int | None, ...], target: Shape) -> Rule:
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
    lost = frozenset(name for name in sizes if name not in used)
    return Rule((dims,), (tuple(after),), sizes, empty_of(sizes) | lost, linear=_LINEAR)


def _order(op: Op, values: Values, order: list[int | None]) -> Rule:
    output = op.outputs[0]
    assert output is not None
    return _mapped(values[op.inputs[0]].shape, tuple(order), values[output].shape)


def _transpose(op: Op, values: Values) -> Rule:
    ndim = len(values[op.inputs[0]].shape)
    order: list[int | None] = list(range(ndim))
    if ndim:
        a, b = argument(op, 1, "dim0", -1) % ndim, argument(op, 2, "dim1", -2) % ndim
        order[a], order[b] = order[b], order[a]
    return _order(op, values, order)


def _t(op: Op, values: Values) -> Rule:
    return _order(op, values, list(reversed(range(len(values[op.inputs[0]].shape)))))


def _permute(op: Op, values: Values) -> Rule:
    dims = argument(op, 1, "dims")
    return _order(op, values, [d % len(dims) for d in dims])


def _movedim(op: Op, values: Values) -> Rule:
    ndim = len(values[op.inputs[0]].shape)
    moves = [argument(op, 1, "source"), argument(op, 2, "destination")]
    source, target = ([m % ndim] if isinstance(m, int) else [d % ndim for d in m] for m in moves)
    order: list[int | None] = [None] * ndim
    for a, b in zip(source, target, strict=True):
        order[b] = a
    others = iter(d for d in range(ndim) if d not in source)
    return _order(op, values, [next(others) if d is None else d for d in order])


def _expand(op: Op, values: Values) -> Rule:
    ndim = len(values[op.inputs[0]].shape)
    output = op.outputs[0]
    assert output is not None
    new = len(values[output].shape) - ndim
    return _order(op, values, [None] * new + list(range(ndim)))


def _repeat(op: Op, values: Values) -> Rule:
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


def _repeat_interleave(op: Op, values: Values) -> Rule:
    """repeat_interleave by one number along one dim: n becomes (n r)."""
    shape, count, dim = (
        values[op.inputs[0]].shape,
        argument(op, 1, "repeats"),
        argument(op, 2, "dim"),
    )
    if isinstance(count, Ref) or dim is None:
        return whole(op, values)
    dims, sizes = along(shape)
    after = list(dims)
    if count != 1:
        sizes["r"] = count
        after[dim % len(shape)] += ("r",)
    return Rule((dims,), (tuple(after),), sizes, empty_of(sizes), linear=_LINEAR)


def _select(op: Op, values: Values) -> Rule:
    shape = values[op.inputs[0]].shape
    dim = argument(op, 1, "dim", 0) % len(shape)
    return _order(op, values, [i for i in range(len(shape)) if i != dim])


def _select_backward(op: Op, values: Values) -> Rule:
    sizes, dim = argument(op, 1, "input_sizes"), argument(op, 2, "dim")
    dim %= len(sizes)
    order: list[int | None] = [i if i < dim else i - 1 for i in range(len(sizes))]
    order[dim] = None
    return _block_new(_order(op, values, order))


def _block_new(rule: Rule) -> Rule:
    """The rule with every factor that stands on one side only blocked."""
    sides = [
        {name for dims in side if dims is not None for dim in dims for name in dim}
        for side in (rule.inputs, rule.outputs)
    ]
    lone = frozenset(sides[0] ^ sides[1])
    return Rule(
        rule.inputs, rule.outputs, rule.sizes, rule.blocked | lone, rule.reduce, rule.linear
    )


def parted(whole_size: int, size: int, start: int) -> int | None:
    """Which of the equal parts of a dim a slice is, or None if it is not one.

    >>> parted(12, 4, 8), parted(12, 5, 0)
    (2, None)
    """
    if size and whole_size % size == 0 and start % size == 0:
        return start // size
    return None


def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice, counted from the front and kept within the dim."""
    first = 0 if start is None else start + size if start < 0 else start
    last = size if end is None else end + size if end < 0 else end
    first = min(max(first, 0), size)
    return first, min(max(last, first), size)


def slice_rule(wide: Shape, narrow: Shape, dim: int, start: int, step: int, back: bool) -> Rule:
    """A slice of `wide` along `dim` that gives `narrow`; `back` for its gradient."""
    dims, sizes = along(wide)
    short = list(dims)
    blocked = set()
    if wide[dim] != narrow[dim]:
        name = LETTERS[dim]
        sizes.pop(name, None)
        part = parted(wide[dim], narrow[dim], start) if step == 1 else None
        long: tuple[str, ...] = ()
        short[dim] = ()
        if part is not None:
            sizes["part"] = wide[dim] // narrow[dim]
            blocked.add("part")
            short[dim] = (name,) if narrow[dim] != 1 else ()
            long = ("part", *short[dim])
            if short[dim]:
                sizes[name] = narrow[dim]
        else:
            for key, size in (("from", wide[dim]), ("to", narrow[dim])):
                if size != 1:
                    sizes[key] = size
                    blocked.add(key)
            long = ("from",) if wide[dim] != 1 else ()
            short[dim] = ("to",) if narrow[dim] != 1 else ()
        dims = dims[:dim] + (long,) + dims[dim + 1 :]
    pair = (dims, tuple(short))
    before, after = reversed(pair) if back else pair
    return Rule((before,), (after,), sizes, frozenset(blocked) | empty_of(sizes), linear=_LINEAR)


def _slice(op: Op, values: Values) -> Rule:
    shape = values[op.inputs[0]].shape
    output = op.outputs[0]
    assert output is not None
    dim = argument(op, 1, "dim", 0) % len(shape)
    start, _ = bounds(shape[dim], argument(op, 2, "start"), argument(op, 3, "end"))
    return slice_rule(shape, values[output].shape, dim, start, argument(op, 4, "step", 1), False)


def _slice_backward(op: Op, values: Values) -> Rule:
    shape = tuple(argument(op, 1, "input_sizes"))
    dim = argument(op, 2, "dim") % len(shape)
    start, _ = bounds(shape[dim], argument(op, 3, "start"), argument(op, 4, "end"))
    step = argument(op, 5, "step", 1)
    return slice_rule(shape, values[op.inputs[0]].shape, dim, start, step, True)


def _scattered(op: Op, values: Values) -> Rule:
    """slice_scatter, select_scatter: `src` written over part of one dim of self."""
    shape, written = in_shapes(op, values)
    dim = argument(op, 2, "dim", 0) % len(shape)
    dims, sizes = along(shape)
    blocked = {LETTERS[dim]} & set(sizes)
    source = list(dims)
    if len(written) < len(shape):
        del source[dim]
    elif written[dim] != shape[dim]:
        source[dim] = () if written[dim] == 1 else ("to",)
        if written[dim] != 1:
            sizes["to"] = written[dim]
            blocked.add("to")
    return Rule(
        (dims, tuple(source)), (dims,), sizes, frozenset(blocked) | empty_of(sizes), None, ((0, 1),)
    )


def _split(op: Op, values: Values) -> Rule:
    shape = values[op.inputs[0]].shape
    dim = argument(op, 2, "dim", 0) % len(shape)
    given = argument(op, 1, "split_size")
    given = argument(op, 1, "split_sizes") if given is None else given
    if isinstance(given, int):
        lengths = [min(given, shape[dim] - at) for at in range(0, shape[dim], max(given, 1))]
    else:
        lengths = list(given)
    return _cut(op, shape, dim, lengths)


def _unbind(op: Op, values: Values) -> Rule:
    shape = values[op.inputs[0]].shape
    dim = argument(op, 1, "dim", 0) % len(shape)
    dims, sizes = along(shape)
    kept = dims[:dim] + dims[dim + 1 :]
    return Rule(
        (dims,),
        (kept,) * len(op.outputs),
        sizes,
        frozenset({LETTERS[dim]}) & frozenset(sizes) | empty_of(sizes),
        linear=_LINEAR,
    )


def _cut(op: Op, shape: Shape, dim: int, lengths: list[int]) -> Rule:
    dims, sizes = along(shape)
    long, short, blocked = _parts(lengths, LETTERS[dim], sizes)
    outputs = tuple(dims[:dim] + (d,) + dims[dim + 1 :] for d in short)
    before = dims[:dim] + (long,) + dims[dim + 1 :]
    return Rule((before,), outputs, sizes, blocked | empty_of(sizes), linear=_LINEAR)


def _parts(
    lengths: list[int], name: str, sizes: dict[str, int]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], frozenset[str]]:
    """Factors of a dim made of parts, of each part, and which of them are blocked."""
    sizes.pop(name, None)
    equal = len(set(lengths)) == 1
    if equal:
        inner = (name,) if lengths[0] != 1 else ()
        sizes.update({name: lengths[0]} if inner else {})
        if len(lengths) == 1:
            return inner, [inner], frozenset()
        sizes["part"] = len(lengths)
        return ("part", *inner), [inner] * len(lengths), frozenset({"part"})
    total = sum(lengths)
    own = {f"p{i}": n for i, n in enumerate(lengths) if n != 1}
    own |= {"all": total} if total != 1 else {}
    sizes.update(own)
    short = [(f"p{i}",) if n != 1 else () for i, n in enumerate(lengths)]
    return ("all",) if total != 1 else (), short, frozenset(own)


def _cat(op: Op, values: Values) -> Rule:
    shapes = in_shapes(op, values)
    (output,) = out_shapes(op, values)
    assert output is not None
    dim = argument(op, 1, "dim", 0) % len(output)
    # An empty one-dim tensor may join any others; it adds nothing.
    if any(len(shape) != len(output) for shape in shapes):
        return whole(op, values)
    dims, sizes = along(output)
    long, short, blocked = _parts([s[dim] for s in shapes], LETTERS[dim], sizes)
    inputs = tuple(dims[:dim] + (d,) + dims[dim + 1 :] for d in short)
    after = dims[:dim] + (long,) + dims[dim + 1 :]
    return Rule(
        inputs,
        (after,),
        sizes,
        blocked | empty_of(sizes),
        linear=(tuple(range(len(shapes))),),
    )


def _stack(op: Op, values: Values) -> Rule:
    shapes = in_shapes(op, values)
    dims, sizes = along(shapes[0])
    dim = argument(op, 1, "dim", 0) % (len(dims) + 1)
    new: tuple[str, ...] = ()
    if len(shapes) != 1:
        sizes["part"] = len(shapes)
        new = ("part",)
    after = dims[:dim] + (new,) + dims[dim:]
    return Rule(
        (dims,) * len(shapes),
        (after,),
        sizes,
        frozenset(new) | empty_of(sizes),
        linear=(tuple(range(len(shapes))),),
    )


def _pad(op: Op, values: Values) -> Rule:
    """constant_pad_nd: padded dims are blocked; padding with anything but zero is not linear."""
    zero = argument(op, 2, "value", 0) == 0
    return _resized(op, values, _LINEAR if zero else ())


def _resized(op: Op, values: Values, linear: tuple[tuple[int, ...], ...] = _LINEAR) -> Rule:
    """An op that changes the size of some dims of its operand, mixing elements along those only."""
    shape = values[op.inputs[0]].shape
    (output,) = out_shapes(op, values)
    assert output is not None and len(output) == len(shape)
    rule = _mapped(shape, tuple(range(len(shape))), output)
    blocked = _block_new(rule).blocked
    return Rule(rule.inputs, rule.outputs, rule.sizes, blocked, linear=linear)


def _mixed(op: Op, values: Values) -> Rule:
    """flip, roll: the named dims (all, if none is named) are blocked."""
    shape = values[op.inputs[0]].shape
    position = 1 if op.target.startswith("aten.flip") else 2
    named = argument(op, position, "dims", ())
    dims, sizes = along(shape)
    mixed = {LETTERS[d % len(shape)] for d in named} if named else set(sizes)
    return Rule(
        (dims,),
        (dims,),
        sizes,
        frozenset(mixed) & frozenset(sizes) | empty_of(sizes),
        linear=_LINEAR,
    )


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
    "aten.view.dtype": whole,
    "aten.transpose": _transpose,
    "aten.t": _t,
    "aten.numpy_T": _t,
    "aten.permute": _permute,
    "aten.movedim": _movedim,
    "aten.expand": _expand,
    "aten.expand_copy": _expand,
    "aten.broadcast_to": _expand,
    "aten.repeat": _repeat,
    "aten.repeat_interleave": whole,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.select": _select,
    "aten.select_backward": _select_backward,
    "aten.slice": _slice,
    "aten.slice_backward": _slice_backward,
    "aten.slice_scatter": _scattered,
    "aten.select_scatter": _scattered,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.unbind": _unbind,
    "aten.cat": _cat,
    "aten.concat": _cat,
    "aten.stack": _stack,
    "aten.constant_pad_nd": _pad,
    "aten.reflection_pad1d": _resized,
    "aten.reflection_pad2d": _resized,
    "aten.replication_pad1d": _resized,
    "aten.replication_pad2d": _resized,
    "aten.flip": _mixed,
    "aten.roll": _mixed,
    "aten.as_strided": whole,
    "aten.view_as_complex": line("... [c] -> ...", _LINEAR, reduce=None),
    "aten.view_as_real": line("... -> ... [c]", _LINEAR, reduce=None),
}
