"""Steps carried out on numpy arrays, all ranks at once, exactly as the collectives would.

The check of every plan, and the ground under certificates: cut a known tensor by the first layout
(a pending reduction gets random summands), do each step group by group, and see that every rank
holds what the last layout says. Only what a rank would really hold is used; no step looks at the
whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperparallel.layout.exchange import MovedBlock
from hyperparallel.layout.layout import Layout
from hyperparallel.layout.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Move,
    Pend,
    Permute,
    ReduceScatter,
    SendRecv,
    Slice,
    Step,
)

Array = NDArray[Any]
HeldPieces = dict[int, Array]
"""What each rank holds."""

_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def emulate(steps: Sequence[Step], held: Mapping[int, Array], shape: Sequence[int]) -> HeldPieces:
    """What every rank holds after the steps; `held` is what it holds before, `shape` is global."""
    now = dict(held)
    for step in steps:
        now = _do(step, now, tuple(shape))
        _check_shapes(step.dst, now, shape)
    return now


def cut(layout: Layout, whole: Array, rng: np.random.Generator | None = None) -> HeldPieces:
    """The pieces of a tensor; along pending axes random summands that reduce to it.

    >>> from hyperparallel.layout import Mesh
    >>> cut(Mesh((2,), ("dp",))("dp"), np.arange(3))
    {0: array([0, 1]), 1: array([2])}
    """
    rng = np.random.default_rng(0) if rng is None else rng
    shares: dict[tuple[int, ...], Array] = {(): whole}
    for axis, op in layout.partial:
        size = layout.mesh.axis_size(axis)
        shares = {
            (*at, i): part
            for at, value in shares.items()
            for i, part in enumerate(_summands(value, op, size, rng))
        }
    held = {}
    for rank in layout.mesh.ranks:
        at = layout.mesh.coordinate(rank)
        share = shares[tuple(at[axis] for axis, _ in layout.partial)]
        held[rank] = share[layout.slices(whole.shape, rank)].copy()
    return held


def join(layout: Layout, held: Mapping[int, Array], shape: Sequence[int]) -> Array:
    """The tensor that the pieces mean; ValueError if ranks that should agree do not."""
    values: Mapping[int, Array] = dict(held)
    for axis, op in reversed(layout.partial):
        values = {
            rank: reduce(_REDUCE[op], [values[r] for r in layout.mesh.group(rank, axis)])
            for rank in layout.mesh.ranks
        }
    first = values[layout.mesh.ranks[0]]
    whole, filled = np.zeros(tuple(shape), first.dtype), np.zeros(tuple(shape), bool)
    for rank in layout.mesh.ranks:
        place = layout.slices(shape, rank)
        if values[rank].shape != whole[place].shape:
            raise ValueError(f"rank {rank} holds {values[rank].shape}, not {whole[place].shape}")
        if not np.array_equal(whole[place][filled[place]], values[rank][filled[place]]):
            raise ValueError(f"rank {rank} disagrees with another rank about {place} of {layout}")
        whole[place], filled[place] = values[rank], True
    if not filled.all():
        raise ValueError(f"{layout} leaves part of {tuple(shape)} on no rank")
    return whole


def _summands(value: Array, op: str, size: int, rng: np.random.Generator) -> list[Array]:
    noise = [rng.integers(-9, 10, value.shape).astype(value.dtype) for _ in range(size)]
    if op == "sum":
        # Integers, so that sums in any order are exact and a wrong step shows as a difference, not as
        # rounding.
        noise[0] = value - sum(noise[1:])
    elif op == "prod":
        noise = [np.where(part < 0, -1, 1) for part in noise]
        noise[0] = value * np.prod(noise[1:], axis=0)
    else:
        holder, away = rng.integers(size, size=value.shape), -1 if op == "max" else 1
        noise = [value + np.where(holder == i, 0, away * abs(part)) for i, part in enumerate(noise)]
    return [np.asarray(part, value.dtype) for part in noise]


def _do(step: Step, held: HeldPieces, shape: tuple[int, ...]) -> HeldPieces:
    if isinstance(step, Slice):
        return {rank: held[rank][_inside(step, shape, rank)] for rank in step.src.mesh.ranks}
    if isinstance(step, Permute | SendRecv):
        return _exchange(step.dst, step.blocks(shape), held, shape)
    if isinstance(step, Move):
        return held
    done: HeldPieces = {}
    for group in step.src.mesh.groups(step.axes):
        # In the order of the step's axes: it is the order in which gathered pieces are joined.
        members = step.src.mesh.group(group[0], step.axes)
        done.update(_do_group(step, members, held, shape))
    return done


def _do_group(step: Step, members: tuple[int, ...], held: HeldPieces, shape: tuple[int, ...]) -> HeldPieces:
    pieces = [held[rank] for rank in members]
    if isinstance(step, AllGather):
        joined = np.concatenate(pieces, step.dim)
        return dict.fromkeys(members, joined)
    if isinstance(step, AllReduce | ReduceScatter):
        total = reduce(_REDUCE[step.op], pieces)
        if isinstance(step, AllReduce):
            return dict.fromkeys(members, total)
        return dict(zip(members, _split(step, step.dim, total, members, shape), strict=True))
    if isinstance(step, AllToAll):
        sent = [_split(step, step.to_dim, piece, members, shape) for piece in pieces]
        return {
            rank: np.concatenate([parts[i] for parts in sent], step.from_dim)
            for i, rank in enumerate(members)
        }
    if isinstance(step, Pend):
        empty = _neutral(step.op, pieces[0].dtype)
        return {
            rank: piece if i == 0 else np.full_like(piece, empty)
            for i, (rank, piece) in enumerate(zip(members, pieces, strict=True))
        }
    raise TypeError(f"no simulation for {type(step).__name__}")


def _neutral(op: str, dtype: np.dtype[Any]) -> Any:
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if not np.issubdtype(dtype, np.integer):
        return -np.inf if op == "max" else np.inf
    return np.iinfo(dtype).min if op == "max" else np.iinfo(dtype).max


def _split(step: Step, dim: int, value: Array, members: Sequence[int], shape: tuple[int, ...]) -> list[Array]:
    """A member's value in one part per member, by the lengths that they hold after the step."""
    lengths = [step.dst.local_shape(shape, rank)[dim] for rank in members]
    return np.split(value, np.cumsum(lengths)[:-1], dim)


def _inside(step: Step, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    before, after = step.src.slices(shape, rank), step.dst.slices(shape, rank)
    return tuple(
        slice(new.start - old.start, new.stop - old.start) for old, new in zip(before, after, strict=True)
    )


def _exchange(
    dst: Layout, blocks: Sequence[MovedBlock], held: HeldPieces, shape: tuple[int, ...]
) -> HeldPieces:
    dtype = next(iter(held.values())).dtype
    # A value that tests do not use, so that what no block fills is seen.
    done = {rank: np.full(dst.local_shape(shape, rank), -77, dtype) for rank in dst.mesh.ranks}
    for block in blocks:
        done[block.dst_rank][block.dst_slices] = held[block.src_rank][block.src_slices]
    return done


def _check_shapes(layout: Layout, held: HeldPieces, shape: Sequence[int]) -> None:
    for rank in layout.mesh.ranks:
        if held[rank].shape != layout.local_shape(shape, rank):
            raise ValueError(f"rank {rank} holds {held[rank].shape} under {layout}")
