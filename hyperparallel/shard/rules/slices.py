"""Rules of ops that take part of a dim, join dims, or mix the elements along one.

A slice, split, join or stack along a dim blocks that dim. Only if the pieces are equal does the dim
become ((part) inner) with `inner` free: fused projections cut in equal thirds stay cut.
"""

from __future__ import annotations

from hyperparallel.shard.rules.notation import Shape
from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    OpValues,
    along,
    argument,
    empty_of,
    in_shapes,
    out_shapes,
    uncut,
)
from hyperparallel.shard.rules.rule import OpFacts, Rule
from hyperparallel.shard.rules.views import mapped, reordered
from hyperparallel.workload.ops import Op

_LINEAR = ((0,),)


def _select(op: Op, values: OpValues) -> Rule:
    shape = values[op.inputs[0]].shape
    dim = argument(op, 1, "dim", 0) % len(shape)
    return reordered(op, values, [i for i in range(len(shape)) if i != dim])


def _select_backward(op: Op, values: OpValues) -> Rule:
    sizes, dim = argument(op, 1, "input_sizes"), argument(op, 2, "dim")
    dim %= len(sizes)
    order: list[int | None] = [i if i < dim else i - 1 for i in range(len(sizes))]
    order[dim] = None
    return _block_new(reordered(op, values, order))


def _block_new(rule: Rule) -> Rule:
    """The rule with every factor that stands on one side only blocked."""
    sides = [
        {name for dims in side if dims is not None for dim in dims for name in dim}
        for side in (rule.inputs, rule.outputs)
    ]
    # Its other side would be asked for elements that the rank has not got.
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
        # One of equal parts: the dim is (part inner), and inner may be cut in every part alike.
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
        dims = (*dims[:dim], long, *dims[dim + 1 :])
    pair = (dims, tuple(short))
    before, after = reversed(pair) if back else pair
    return Rule((before,), (after,), sizes, frozenset(blocked) | empty_of(sizes), linear=_LINEAR)


def _slice(op: Op, values: OpValues) -> Rule:
    shape = values[op.inputs[0]].shape
    output = op.outputs[0]
    assert output is not None
    dim = argument(op, 1, "dim", 0) % len(shape)
    start, _ = bounds(shape[dim], argument(op, 2, "start"), argument(op, 3, "end"))
    return slice_rule(shape, values[output].shape, dim, start, argument(op, 4, "step", 1), False)


def _slice_backward(op: Op, values: OpValues) -> Rule:
    shape = tuple(argument(op, 1, "input_sizes"))
    dim = argument(op, 2, "dim") % len(shape)
    start, _ = bounds(shape[dim], argument(op, 3, "start"), argument(op, 4, "end"))
    step = argument(op, 5, "step", 1)
    return slice_rule(shape, values[op.inputs[0]].shape, dim, start, step, True)


def _scattered(op: Op, values: OpValues) -> Rule:
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


def _split(op: Op, values: OpValues) -> Rule:
    shape = values[op.inputs[0]].shape
    dim = argument(op, 2, "dim", 0) % len(shape)
    given = argument(op, 1, "split_size")
    given = argument(op, 1, "split_sizes") if given is None else given
    if isinstance(given, int):
        lengths = [min(given, shape[dim] - at) for at in range(0, shape[dim], max(given, 1))]
    else:
        lengths = list(given)
    return _cut(shape, dim, lengths)


def _unbind(op: Op, values: OpValues) -> Rule:
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


def _cut(shape: Shape, dim: int, lengths: list[int]) -> Rule:
    dims, sizes = along(shape)
    long, short, blocked = _parts(lengths, LETTERS[dim], sizes)
    outputs = tuple((*dims[:dim], d, *dims[dim + 1 :]) for d in short)
    before = (*dims[:dim], long, *dims[dim + 1 :])
    return Rule((before,), outputs, sizes, blocked | empty_of(sizes), linear=_LINEAR)


def _parts(
    lengths: list[int], name: str, sizes: dict[str, int]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], frozenset[str]]:
    """Factors of a dim made of parts, of each part, and which of them are blocked."""
    sizes.pop(name, None)
    # Unequal parts have no inner factor in common that a cut would divide alike.
    equal = len(set(lengths)) == 1
    if equal:
        inner: tuple[str, ...] = (name,) if lengths[0] != 1 else ()
        sizes.update({name: lengths[0]} if inner else {})
        if len(lengths) == 1:
            return inner, [inner], frozenset()
        sizes["part"] = len(lengths)
        return ("part", *inner), [inner] * len(lengths), frozenset({"part"})
    total = sum(lengths)
    own = {f"p{i}": n for i, n in enumerate(lengths) if n != 1}
    own |= {"all": total} if total != 1 else {}
    sizes.update(own)
    short: list[tuple[str, ...]] = [(f"p{i}",) if n != 1 else () for i, n in enumerate(lengths)]
    return ("all",) if total != 1 else (), short, frozenset(own)


def _cat(op: Op, values: OpValues) -> Rule:
    shapes = in_shapes(op, values)
    (output,) = out_shapes(op, values)
    assert output is not None
    dim = argument(op, 1, "dim", 0) % len(output)
    # An empty one-dim tensor may join any others; it adds nothing.
    if any(len(shape) != len(output) for shape in shapes):
        return uncut(op, values)
    dims, sizes = along(output)
    long, short, blocked = _parts([s[dim] for s in shapes], LETTERS[dim], sizes)
    inputs = tuple((*dims[:dim], d, *dims[dim + 1 :]) for d in short)
    after = (*dims[:dim], long, *dims[dim + 1 :])
    return Rule(
        inputs,
        (after,),
        sizes,
        blocked | empty_of(sizes),
        linear=(tuple(range(len(shapes))),),
    )


def _stack(op: Op, values: OpValues) -> Rule:
    shapes = in_shapes(op, values)
    dims, sizes = along(shapes[0])
    dim = argument(op, 1, "dim", 0) % (len(dims) + 1)
    new: tuple[str, ...] = ()
    if len(shapes) != 1:
        sizes["part"] = len(shapes)
        new = ("part",)
    after = (*dims[:dim], new, *dims[dim:])
    return Rule(
        (dims,) * len(shapes),
        (after,),
        sizes,
        frozenset(new) | empty_of(sizes),
        linear=(tuple(range(len(shapes))),),
    )


def _pad(op: Op, values: OpValues) -> Rule:
    """constant_pad_nd: padded dims are blocked; padding with anything but zero is not linear."""
    zero = argument(op, 2, "value", 0) == 0
    return _resized(op, values, _LINEAR if zero else ())


def _resized(op: Op, values: OpValues, linear: tuple[tuple[int, ...], ...] = _LINEAR) -> Rule:
    """An op that changes the size of some dims of its operand, mixing elements along those only."""
    shape = values[op.inputs[0]].shape
    (output,) = out_shapes(op, values)
    assert output is not None and len(output) == len(shape)
    rule = mapped(shape, tuple(range(len(shape))), output)
    blocked = _block_new(rule).blocked
    return Rule(rule.inputs, rule.outputs, rule.sizes, blocked, linear=linear)


def _mixed(op: Op, values: OpValues) -> Rule:
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
}

FACTS: dict[str, OpFacts] = {
    **dict.fromkeys(("aten.slice", "aten.select"), OpFacts(view=True, group="view")),
    **dict.fromkeys(("aten.cat", "aten.roll", "aten.slice_backward"), OpFacts(fresh=True)),
}
