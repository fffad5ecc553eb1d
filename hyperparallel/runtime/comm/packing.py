"""Many tensors in one flat message: what a transport does for which each message is dear.

A message of several members is ordered by member, then by tensor, each piece dense. Pieces are cut along
any dim, unevenly or empty. All tensors of a message have one dtype.

Leaves out how the message travels (`process_group.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hyperparallel.runtime.comm.collectives import InFlight, InFlightMany

PieceSizes = Sequence[Sequence[int]]
"""Per tensor, the elements of each member's piece along the dim that is cut."""


class Packed:
    """A message under way, and how it becomes the results."""

    __slots__ = ("message", "unpack")

    def __init__(self, message: InFlight, unpack: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        self.message, self.unpack = message, unpack

    def wait(self) -> tuple[Tensor, ...]:
        return self.unpack(self.message.wait())


class Mixed:
    """Tensors under way alone and in one message; alone: which, in the order of the results."""

    __slots__ = ("alone", "message", "singles")

    def __init__(self, singles: Sequence[InFlight], message: InFlightMany, alone: Sequence[bool]) -> None:
        self.singles, self.message, self.alone = singles, message, alone

    def wait(self) -> tuple[Tensor, ...]:
        singles, others = iter(self.singles), iter(self.message.wait())
        return tuple([next(singles).wait() if is_alone else next(others) for is_alone in self.alone])


def totals(xs: Sequence[Tensor], dims: Sequence[int], sizes: PieceSizes) -> list[int]:
    """Elements that each member has in the message.

    >>> totals([torch.zeros(2, 3), torch.zeros(4)], [1, 0], [[3, 2], [4, 4]])
    [10, 8]
    """
    units = [math.prod(s for d, s in enumerate(x.shape) if d != dim) for x, dim in zip(xs, dims, strict=True)]
    # By member: sizes are given by tensor.
    counts = zip(*sizes, strict=True)
    return [sum(unit * size for unit, size in zip(units, count, strict=True)) for count in counts]


def packed_whole(xs: Sequence[Tensor]) -> Tensor:
    """One member's pieces."""
    return torch.cat([x.reshape(-1) for x in xs])


def packed_pieces(xs: Sequence[Tensor], dims: Sequence[int], sizes: PieceSizes) -> Tensor:
    """Whole tensors, cut for all members."""
    cut = [x.split(list(parts), dim) for x, dim, parts in zip(xs, dims, sizes, strict=True)]
    # By member first: what one member gets must be one run of the message.
    return torch.cat([piece.reshape(-1) for pieces in zip(*cut, strict=True) for piece in pieces])


def unpacked_pieces(
    flat: Tensor, shapes: Sequence[Sequence[int]], dims: Sequence[int], sizes: PieceSizes
) -> tuple[Tensor, ...]:
    """The tensors whose pieces, by member, make up a message; shapes: of any member's pieces.

    >>> flat = packed_pieces([torch.arange(6).view(2, 3), torch.arange(3)], [1, 0], [[2, 1], [1, 2]])
    >>> unpacked_pieces(flat, [(2, 2), (1,)], [1, 0], [[2, 1], [1, 2]])[0].tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    shaped = [
        [(*shape[:dim], size, *shape[dim + 1 :]) for size in parts]
        for shape, dim, parts in zip(shapes, dims, sizes, strict=True)
    ]
    order = list(zip(*shaped, strict=True))
    pieces = iter(flat.split([math.prod(shape) for member in order for shape in member]))
    members = [[next(pieces).view(shape) for shape in member] for member in order]
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*members, strict=True), dims, strict=True))


def unpacked_whole(flat: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Views of one member's part of a message."""
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return tuple(piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True))
