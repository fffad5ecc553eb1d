"""Rules of lookups and writes by index: embedding, gather, scatter, index, index_put.

A table may be cut along the indexed dim where the local form can mask: a lookup then yields a
pending sum (each index falls in one piece), and an accumulating write yields a piece. Otherwise the
indexed dim is blocked. Accumulating writes may be cut along the index too: their result is a
pending sum in which the tensor written to counts once. Local forms: `graph/local/index.py`.
"""

from __future__ import annotations

from hyperparallel.shard.rules.notation import Shape
from hyperparallel.shard.rules.operands import (
    LETTERS,
    Builder,
    InputGroups,
    OpValues,
    along,
    argument,
    empty_of,
    in_shapes,
    out_shapes,
    uncut,
)
from hyperparallel.shard.rules.rule import FactorDims, OpFacts, Rule
from hyperparallel.workload.ops import Op, Ref

_INDEX = tuple(f"i{k}" for k in range(64))


def _embedding(op: Op, values: OpValues) -> Rule:
    """embedding(weight, indices): v d, i... -> i... d, with v masked when cut."""
    table, index = in_shapes(op, values)
    rows, sizes = along(index, _INDEX)
    (v, d), more = along(table, ("v", "d"))
    every = sizes | more
    return Rule((((v), (d)), rows), ((*rows, d),), every, empty_of(every), linear=((0,),))


def _embedding_backward(op: Op, values: OpValues) -> Rule:
    """embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)"""
    grad, index = in_shapes(op, values)
    rows, sizes = along(index, _INDEX)
    (v, d), more = along((argument(op, 2), grad[-1]), ("v", "d"))
    every = sizes | more
    # Frequencies are counted over the whole batch.
    by_frequency = frozenset(sizes) if argument(op, 4, "", False) else frozenset()
    return Rule(
        ((*rows, d), rows), ((v, d),), every, empty_of(every) | by_frequency, linear=((0,),)
    )


def _numeric(op: Op, values: OpValues) -> bool:
    """Whether pending sums of the first operand make sense."""
    return values[op.inputs[0]].dtype != "bool"


def _dim(op: Op, shape: Shape) -> int:
    return int(argument(op, 1, "dim") % max(len(shape), 1))


def _gather(op: Op, values: OpValues) -> Rule:
    """gather(self, dim, index): the result has the shape of index."""
    table, index = in_shapes(op, values)
    if not table or not index:
        return uncut(op, values)
    dims, sizes, blocked, at = _beside(table, index, _dim(op, table))
    blocked |= empty_of(sizes)
    if not _numeric(op, values):
        # A lookup in a cut table is a sum over ranks, which truth values do not have.
        blocked |= {"v"} & set(sizes)
    return Rule((dims, at), (at,), sizes, frozenset(blocked), linear=((0,),))


def _beside(table: Shape, index: Shape, dim: int) -> tuple[FactorDims, dict[str, int], set[str], FactorDims]:
    """Factors of a table and of an index of the same rank: v and i along `dim`, shared elsewhere.

    Where an index is shorter than its table beside `dim`, only its first elements are meant: both
    are blocked there.
    """
    sizes: dict[str, int] = {}
    blocked: set[str] = set()
    left: list[tuple[str, ...]] = []
    right: list[tuple[str, ...]] = []

    def factor(name: str, size: int, block: bool) -> tuple[str, ...]:
        if size == 1:
            return ()
        sizes[name] = size
        blocked.update({name} if block else ())
        return (name,)

    for k, (a, b) in enumerate(zip(table, index, strict=True)):
        if k == dim:
            left.append(factor("v", a, False))
            right.append(factor("i", b, False))
        elif a == b:
            left.append(factor(LETTERS[k], a, False))
            right.append(left[-1])
        else:
            left.append(factor(f"w{k}", a, True))
            right.append(factor(f"j{k}", b, True))
    return tuple(left), sizes, blocked, tuple(right)


def _scatter(accumulates: bool) -> Builder:
    """scatter, scatter_add, scatter_reduce: (self, dim, index, src or value)"""

    def build(op: Op, values: OpValues) -> Rule:
        shapes = in_shapes(op, values)
        table, index = shapes[:2]
        same = all(shape == index for shape in shapes[2:])
        if not table or not index or not same:
            return uncut(op, values)
        dims, sizes, blocked, at = _beside(table, index, _dim(op, table))
        if not accumulates:
            # Which of two writes to one place comes last must not depend on how they are cut.
            blocked |= {"v", "i"} & set(sizes)
        plain = accumulates or op.target in ("aten.scatter.src", "aten.scatter.value")
        linear: InputGroups = ((0, 2),) if len(shapes) > 2 and plain else ()
        inputs = (dims,) + (at,) * (len(shapes) - 1)
        return Rule(inputs, (dims,), sizes, frozenset(blocked) | empty_of(sizes), linear=linear)

    return build


def _index_select(op: Op, values: OpValues) -> Rule:
    """index_select(self, dim, index)"""
    table, index = in_shapes(op, values)
    if not table or not index:
        return uncut(op, values)
    dims, i, after, every = _by_index(table, index, _dim(op, table))
    blocked = empty_of(every)
    if not _numeric(op, values):
        blocked |= {"v"} & frozenset(every)
    return Rule((dims, (i,)), (after,), every, blocked, linear=((0,),))


def _by_index(
    table: Shape, index: Shape, dim: int
) -> tuple[FactorDims, tuple[str, ...], FactorDims, dict[str, int]]:
    """Factors of a table (v along `dim`), of an index (i), of the rows that it names, and all their sizes."""
    dims, sizes = along(table, tuple("v" if k == dim else LETTERS[k] for k in range(len(table))))
    (i,), more = along(index, ("i",))
    return dims, i, (*dims[:dim], i, *dims[dim + 1 :]), sizes | more


def _index_add(accumulates: bool) -> Builder:
    """index_add(self, dim, index, source), index_copy likewise"""

    def build(op: Op, values: OpValues) -> Rule:
        table, index, _ = in_shapes(op, values)
        if not table or not index:
            return uncut(op, values)
        dims, i, source, every = _by_index(table, index, _dim(op, table))
        blocked = empty_of(every)
        if not accumulates:
            blocked |= {"v", "i"} & frozenset(every)
        return Rule((dims, (i,), source), (dims,), every, blocked, linear=((0, 2),))

    return build


def _advanced(
    op: Op, values: OpValues
) -> tuple[FactorDims, list[FactorDims], FactorDims, dict[str, int], set[str]] | None:
    """Factors of x[indices]: of x, each index, the result; sizes; the indexed factors."""
    shape = values[op.inputs[0]].shape
    listed = list(argument(op, 1, "indices"))
    given = [(k, values[i.name]) for k, i in enumerate(listed) if isinstance(i, Ref)]
    # A mask picks as many elements as its values say, which no shape tells.
    if not given or any(v.dtype in ("bool", "uint8") for _, v in given):
        return None
    rank = max(len(v.shape) for _, v in given)
    common = [1] * rank
    for _, value in given:
        for k, size in enumerate(value.shape):
            at = rank - len(value.shape) + k
            # Indices broadcast against each other before they look anything up.
            common[at] = size if common[at] == 1 else common[at]
    dims, sizes = along(shape)
    every, more = along(tuple(common), _INDEX)
    indices = [
        tuple(
            () if size == 1 else every[rank - len(value.shape) + k]
            for k, size in enumerate(value.shape)
        )
        for _, value in given
    ]
    listed_at = [k for k, _ in given]
    indexed = {LETTERS[k] for k in listed_at} & set(sizes)
    kept = [dims[k] for k in range(len(shape)) if k not in listed_at]
    # Neighbouring indices leave their result in their place, others move it to the front.
    place = (
        listed_at[0] if listed_at == list(range(listed_at[0], listed_at[0] + len(listed_at))) else 0
    )
    after = (*kept[:place], *every, *kept[place:])
    return dims, indices, after, sizes | more, indexed


def _index(op: Op, values: OpValues) -> Rule:
    """index(self, indices): the indexed dims are blocked, those of the indices are free."""
    factors = _advanced(op, values)
    (shape,) = out_shapes(op, values)
    if factors is None or shape is None:
        return uncut(op, values)
    dims, indices, after, sizes, indexed = factors
    blocked = frozenset(indexed) | empty_of(sizes)
    return Rule((dims, *indices), (after,), sizes, blocked, linear=((0,),))


def _index_put(op: Op, values: OpValues) -> Rule:
    """index_put(self, indices, values, accumulate): indices may be cut only if it accumulates."""
    factors = _advanced(op, values)
    if factors is None or not isinstance(argument(op, 2, "values"), Ref):
        return uncut(op, values)
    dims, indices, after, sizes, indexed = factors
    shape = values[op.inputs[-1]].shape
    tail = after[len(after) - len(shape) :]
    written = tuple(() if size == 1 else dim for dim, size in zip(tail, shape, strict=True))
    blocked = frozenset(indexed) | empty_of(sizes)
    if not argument(op, 3, "accumulate", False):
        # Two indices may name one place, and the later write wins.
        blocked |= frozenset(sizes) & frozenset(_INDEX)
    linear: InputGroups = ((0, len(op.inputs) - 1),)
    return Rule((dims, *indices, written), (dims,), sizes, blocked, linear=linear)


def _triangle(op: Op, values: OpValues) -> Rule:
    """tril, triu: both dims are free, the diagonal moves with the piece."""
    dims, sizes = along(values[op.inputs[0]].shape)
    return Rule((dims,), (dims,), sizes, empty_of(sizes), linear=((0,),))


RULES: dict[str, Builder] = {
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.scatter.src": _scatter(accumulates=False),
    "aten.scatter.value": _scatter(accumulates=False),
    "aten.scatter.reduce": _scatter(accumulates=False),
    "aten.scatter.value_reduce": _scatter(accumulates=False),
    "aten.scatter_reduce": _scatter(accumulates=False),
    "aten.scatter_add": _scatter(accumulates=True),
    "aten.index_select": _index_select,
    "aten.index_add": _index_add(accumulates=True),
    "aten.index_copy": _index_add(accumulates=False),
    "aten.index": _index,
    "aten._unsafe_index": _index,
    "aten.index_put": _index_put,
    "aten._unsafe_index_put": _index_put,
    "aten._index_put_impl": _index_put,
    "aten.tril": _triangle,
    "aten.triu": _triangle,
    "aten.masked_select": uncut,
    "aten.masked_scatter": uncut,
    "aten.nonzero": uncut,
}

FACTS: dict[str, OpFacts] = {
    "aten.embedding": OpFacts(fresh=True, looks_up=True),
    "aten.gather": OpFacts(looks_up=True),
}
