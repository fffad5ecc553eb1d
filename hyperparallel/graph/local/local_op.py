"""One op as one rank runs it: rule, local arguments, and the piece it holds of each cut factor.

A special local form (the other files of this folder) is a function `LocalOp -> tuple of results`. It emits
calls through `emit`, which makes an FX node while a program is partitioned and runs the call at
once in tests, and communicates only through `reduce`. All ranks emit the same calls; arguments may
differ by rank.

Results lack a cut factor in one of two ways: a factor of `rule.inside` leaves them replicated, since the
local form reduced them; any other leaves a pending `rule.reduce`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hyperparallel.shard.rules.rule import FactorDims, Rule
from hyperparallel.workload import Op

aten = torch.ops.aten


@dataclass(frozen=True)
class FactorPiece:
    """This rank's piece of a cut factor: `size` indices from `offset`, counted globally."""

    offset: int
    size: int


@dataclass
class LocalOp:
    """An op to be made local.

    target: the function that the op calls (a `torch.ops` overload).
    args, kwargs: those of the op, with tensors replaced by local ones (or by their FX nodes).
    pieces: the cut factors, each with this rank's piece.
    emit: `emit(fn, *args, **kwargs)` calls `fn`, now or in the program being written.
    reduce: `reduce(x, op, factor, parts)` all-reduces x over the ranks that share `factor`'s cut; x holds
        `parts` numbers for each element of the op's result.
    """

    op: Op
    rule: Rule
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    pieces: Mapping[str, FactorPiece]
    emit: Callable[..., Any]
    reduce: Callable[..., Any]

    def size(self, factor: str) -> int:
        """The size of a factor on this rank."""
        piece = self.pieces.get(factor)
        return self.rule.sizes[factor] if piece is None else piece.size

    def offset(self, factor: str) -> int:
        """The first global index of a factor on this rank."""
        piece = self.pieces.get(factor)
        return 0 if piece is None else piece.offset

    def shape(self, dims: FactorDims) -> tuple[int, ...]:
        """The local shape of an operand made of these factors."""
        return tuple(prod(self.size(f) for f in dim) for dim in dims)

    def global_shape(self, dims: FactorDims) -> tuple[int, ...]:
        """The global shape of an operand made of these factors."""
        return tuple(prod(self.rule.sizes[f] for f in dim) for dim in dims)

    def output_dims(self, i: int = 0) -> FactorDims:
        """The factors of result i, which must be a tensor."""
        dims = self.rule.outputs[i]
        assert dims is not None, f"result {i} of {self.op.target} is not a tensor"
        return dims

    def output_shape(self, i: int = 0) -> tuple[int, ...]:
        """The local shape of result i."""
        return self.shape(self.output_dims(i))

    def lost(self, i: int = 0) -> tuple[str, ...]:
        """The cut factors that result i lacks: it is a pending reduction over them."""
        there = {factor for dim in self.output_dims(i) for factor in dim}
        return tuple(factor for factor in self.pieces if factor not in there)

    def first(self, factors: Iterable[str]) -> bool:
        """Whether this rank holds the first piece of all these factors; one rank does."""
        return all(self.offset(factor) == 0 for factor in factors)

    def argument(self, position: int, name: str = "", default: Any = None) -> Any:
        """The argument at `position`, or by `name`, or its default."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def with_argument(self, position: int, value: Any) -> tuple[Any, ...]:
        """The positional arguments with one replaced, or added where they end."""
        return (*self.args[:position], value, *self.args[position + 1 :])

    def reduce_over(self, x: Any, how: str, factors: Iterable[str], parts: int = 1) -> Any:
        """All-reduce x over each cut factor in turn."""
        for factor in factors:
            if factor in self.pieces:
                x = self.reduce(x, how, factor, parts)
        return x

    def call(
        self,
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Emit the op with these arguments (its own, if not given); one value per result."""
        call = self.emit(
            self.target,
            *(self.args if args is None else args),
            **(self.kwargs if kwargs is None else kwargs),
        )
        return self.unpack(call) if _returns_many(self.target, len(self.op.outputs)) else (call,)

    def call_guarded(
        self,
        args: tuple[Any, ...] | None = None,
        dtypes: Mapping[int, torch.dtype | None] | None = None,
    ) -> tuple[Any, ...]:
        """`call` for a kernel that cannot stand empty operands.

        dtypes: of results unlike the operands, by number; None for single precision at least.
        """
        args = self.args if args is None else args
        # Whole operands are what the kernel was captured with: if empty, they were so on one device too.
        if not self.pieces:
            return self.call(args)
        shapes = [None if dims is None else list(self.shape(dims)) for dims in self.rule.outputs]
        kinds = dict(dtypes or {})
        # Decided when it runs: all ranks emit this call, and each looks whether its own piece is empty.
        call = self.emit(unless_empty, self.target, shapes, kinds, *args, **self.kwargs)
        return self.unpack(call) if _returns_many(self.target, len(self.op.outputs)) else (call,)

    def unpack(self, call: Any) -> tuple[Any, ...]:
        """The results of an emitted call that returns several, None where one is not used."""
        return tuple(
            None if name is None else self.emit(operator.getitem, call, i)
            for i, name in enumerate(self.op.outputs)
        )

    def keep_piece(self, whole: Any, i: int = 0) -> Any:
        """This rank's piece of result i, from the whole of it."""
        dims = self.output_dims(i)
        if not any(factor in self.pieces for dim in dims for factor in dim):
            return whole
        flat = [factor for dim in dims for factor in dim]
        # A cut factor inside a merged dim is a strided piece of it: apart it is a slice of its own dim.
        merged = any(len(dim) > 1 for dim in dims)
        if merged:
            whole = self.emit(aten.reshape.default, whole, [self.rule.sizes[f] for f in flat])
            places = {factor: at for at, factor in enumerate(flat)}
        else:
            places = {dim[0]: at for at, dim in enumerate(dims) if dim}
        for factor in flat:
            if factor in self.pieces:
                piece = self.pieces[factor]
                end = piece.offset + piece.size
                whole = self.emit(aten.slice.Tensor, whole, places[factor], piece.offset, end)
        if merged:
            whole = self.emit(aten.reshape.default, whole, list(self.output_shape(i)))
        return whole


def _returns_many(target: Callable[..., Any], count: int) -> bool:
    """Whether a function with `count` results returns them in a tuple or list."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return count != 1
    returns = schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)


def only_if(x: torch.Tensor, keep: bool) -> torch.Tensor:
    """x, or zeros in its place: for a summand that only one rank may add to a pending sum."""
    return x if keep else torch.zeros_like(x)


def unless_empty(
    target: Callable[..., Any],
    shapes: Sequence[Sequence[int] | None],
    dtypes: Mapping[int, torch.dtype | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The results of `target`, or zeros of these shapes if one of the first two operands is empty.

    dtypes: of results unlike the operands, by number; None for single precision at least.
    """
    first = [x for x in args[:2] if isinstance(x, torch.Tensor)]
    if all(x.numel() for x in first):
        return target(*args, **kwargs)
    own = first[0].dtype
    # As kernels keep statistics (log-sum-exp): float32 of 16 bits, float64 of float64.
    wide = torch.promote_types(own, torch.float32)
    results = tuple(
        None if shape is None else first[0].new_zeros(shape, dtype=dtypes.get(i, own) or wide)
        for i, shape in enumerate(shapes)
    )
    return results if _returns_many(target, len(shapes)) else results[0]


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """x itself if it is contiguous, else a copy that is."""
    return x.contiguous()
