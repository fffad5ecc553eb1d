"""The one-string form of a sharding rule: `"b s h, o h -> b s o"`.

Operands stand in the order of an op's tensor inputs, results after the arrow; dims are separated by
spaces. `h` names a factor, `[h]` one that cannot be cut, `(b s)` a dim merged from two, `1` a dim
of size one, `...` any number of leading dims, which broadcast against each other as in a pointwise
op. An operand that has size one where another has more is broadcast: its dim is made of no factor.

`parse` reads the text once; `bind` fits it to the shapes of one op. Factors of size one are
dropped, since there is nothing to cut in them. The notation comes from einsum and einops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyperparallel.errors import UserError
from hyperparallel.shard.rules.rule import FactorDims, Rule

Shape = tuple[int, ...]

_TOKEN = re.compile(r"\.\.\.|\(|\)|\[|\]|1|[A-Za-z_]\w*|\S")
_REST = ("...",)


@dataclass(frozen=True)
class Pattern:
    """A parsed notation; the dim `("...",)` stands for any number of leading dims."""

    inputs: tuple[FactorDims, ...]
    outputs: tuple[FactorDims, ...]
    blocked: frozenset[str]
    text: str


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Read a notation; raises `UserError` for one that cannot be read.

    >>> parse("b [k], (b o) -> o").inputs
    ((('b',), ('k',)), (('b', 'o'),))
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise UserError("notation", text, 'operands "->" results', instead='"b k, k o -> b o"')
    blocked: set[str] = set()
    inputs = (
        tuple(_operand(part, blocked, text) for part in left.split(",")) if left.strip() else ()
    )
    outputs = tuple(_operand(part, blocked, text) for part in right.split(","))
    return Pattern(inputs, outputs, frozenset(blocked), text)


def _operand(part: str, blocked: set[str], text: str) -> FactorDims:
    dims: list[tuple[str, ...]] = []
    merged: list[str] | None = None
    bracket = False
    for token in _TOKEN.findall(part):
        if token == "(" and merged is None:
            merged = []
        elif token == ")" and merged is not None:
            dims.append(tuple(merged))
            merged = None
        elif token in "[]" and bracket is (token == "]"):
            bracket = token == "["
        elif token == "1" and merged is None:
            dims.append(())
        elif token == "..." and not dims and merged is None:
            dims.append(_REST)
        elif token[0].isalpha() or token[0] == "_":
            if bracket:
                blocked.add(token)
            if merged is None:
                dims.append((token,))
            else:
                merged.append(token)
        else:
            raise UserError("notation", text, "names, 1, ..., ( ) and [ ]", instead=f"no {token!r}")
    if merged is not None or bracket:
        raise UserError("notation", text, "every bracket closed")
    return tuple(dims)


def bind(
    pattern: Pattern,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape | None],
    *,
    sizes: Mapping[str, int] | None = None,
    blocked: frozenset[str] = frozenset(),
    linear: tuple[tuple[int, ...], ...] = (),
    reduce: str | None = "sum",
    inside: Mapping[str, float] | None = None,
) -> Rule:
    """The rule of one op: `pattern` fitted to the shapes of its operands and results.

    `sizes` gives factors that shapes alone do not (the parts of a merged dim). A result of None is
    not a tensor, or unused. Raises `UserError` if the shapes do not fit.

    >>> rule = bind(parse("b k, k o -> b o"), [(8, 4), (4, 6)], [(8, 6)])
    >>> rule.outputs, dict(rule.sizes)
    (((('b',), ('o',)),), {'b': 8, 'k': 4, 'o': 6})
    """
    if len(inputs) != len(pattern.inputs) or len(outputs) > len(pattern.outputs):
        raise UserError(
            "notation", pattern.text, f"{len(inputs)} operands and {len(outputs)} results"
        )
    tensors = [(dims, shape) for dims, shape in zip(pattern.inputs, inputs, strict=True)]
    results = [(d, s) for d, s in zip(pattern.outputs, outputs, strict=False) if s is not None]
    # As many dims as the operand with most of them has; the others' stand at the right of it.
    rest = max((len(s) - len(d) + 1 for d, s in tensors + results if d[:1] == (_REST,)), default=0)
    found: dict[str, int] = dict(sizes or {})
    spread = [(_spread(d, len(s), rest, pattern), s) for d, s in tensors + results]
    for dims, shape in spread:
        for dim, size in zip(dims, shape, strict=True):
            # A size of one may be a broadcast: another operand's larger size of the factor stands.
            if len(dim) == 1 and found.get(dim[0], 1) == 1:
                found[dim[0]] = size
    _solve(spread, found)
    fitted = [_fit(dims, shape, found, pattern) for dims, shape in spread]
    after = iter(fitted[len(tensors) :])
    empty = frozenset(name for name, size in found.items() if size == 0)
    return Rule(
        inputs=tuple(fitted[: len(tensors)]),
        outputs=tuple(None if shape is None else next(after) for shape in outputs),
        sizes={name: size for name, size in found.items() if size != 1},
        blocked=frozenset(n for n in pattern.blocked | blocked if found.get(n, 1) != 1) | empty,
        linear=linear,
        reduce=reduce,
        inside=None
        if inside is None
        else {name: share for name, share in inside.items() if found.get(name, 1) != 1},
    )


def _spread(dims: FactorDims, ndim: int, rest: int, pattern: Pattern) -> FactorDims:
    """`dims` with the dots written out as factors `.0`, `.1`, ..., aligned at the right."""
    if dims[:1] != (_REST,):
        if len(dims) != ndim:
            raise UserError("notation", pattern.text, f"{ndim} dims instead of {len(dims)}")
        return dims
    count = ndim - len(dims) + 1
    if count < 0:
        raise UserError("notation", pattern.text, f"at most {ndim} dims")
    return tuple((f".{i}",) for i in range(rest - count, rest)) + dims[1:]


def _solve(spread: Sequence[tuple[FactorDims, Shape]], found: dict[str, int]) -> None:
    """Find factors of merged dims whose other factors are known, until none is left to find."""
    progress = True
    while progress:
        progress = False
        for dims, shape in spread:
            for dim, size in zip(dims, shape, strict=True):
                unknown = [name for name in dim if name not in found]
                if len(dim) > 1 and len(unknown) == 1:
                    known = 1
                    for name in dim:
                        known *= found.get(name, 1)
                    # A size that does not divide is left unknown, and refused by `_fit` with the factor's
                    # name.
                    if known and size % known == 0:
                        found[unknown[0]] = size // known
                        progress = True


def _fit(dims: FactorDims, shape: Shape, found: Mapping[str, int], pattern: Pattern) -> FactorDims:
    fitted = []
    for dim, size in zip(dims, shape, strict=True):
        product = 1
        for name in dim:
            if name not in found:
                raise UserError("notation", pattern.text, f"a size for {name}")
            product *= found[name]
        if product == size:
            fitted.append(tuple(name for name in dim if found[name] != 1))
        elif size == 1:
            # Broadcast: this operand has none of the factor's points to cut.
            fitted.append(())
        else:
            raise UserError(
                "notation", pattern.text, f"{' '.join(dim) or '1'} of size {size}, not {product}"
            )
    return tuple(fitted)


def write(rule: Rule) -> str:
    """The rule as text, in the notation that `parse` reads.

    >>> write(bind(parse("b [k], k o -> b o"), [(8, 4), (4, 6)], [(8, 6)]))
    'b [k], [k] o -> b o'
    """

    def name(factor: str) -> str:
        return f"[{factor}]" if factor in rule.blocked else factor

    def dim(factors: tuple[str, ...]) -> str:
        text = " ".join(name(factor) for factor in factors)
        return text if len(factors) == 1 else f"({text})" if factors else "1"

    def side(operands: Sequence[FactorDims | None]) -> str:
        return ", ".join("-" if d is None else " ".join(map(dim, d)) for d in operands)

    return f"{side(rule.inputs)} -> {side(rule.outputs)}"
