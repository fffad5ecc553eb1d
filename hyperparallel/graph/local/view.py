"""Local forms of views, slices, and factories: global sizes in arguments become local ones.

Views are emitted as `reshape`: a local tensor may have other strides than the global one had, for
instance when it is a slice of a whole, and `view` would refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperparallel.graph.local.local_op import LocalOp
from hyperparallel.shard.rules.slices import bounds

aten = torch.ops.aten
Form = Callable[[LocalOp], tuple[Any, ...]]


def _reshape(local: LocalOp) -> tuple[Any, ...]:
    return (local.emit(aten.reshape.default, local.args[0], list(local.output_shape())),)


def _unchanged_or_reshape(local: LocalOp) -> tuple[Any, ...]:
    """squeeze: a dim cut down to size one must not be taken for one of size one."""
    return _reshape(local) if local.pieces else local.call()


def _sized(position: int) -> Form:
    """An op whose argument at `position` is the shape of its result."""

    def form(local: LocalOp) -> tuple[Any, ...]:
        if not local.pieces:
            return local.call()
        return local.call(local.with_argument(position, list(local.output_shape())))

    return form


def _part(local: LocalOp, parts: tuple[str, ...], start: int) -> tuple[int, int] | None:
    """Start and end of an equal part of a dim made of (part, inner), if `inner` is cut."""
    if len(parts) != 2 or parts[1] not in local.pieces:
        return None
    size = local.size(parts[1])
    # The part number stays, its width is the local one: q, k, v of a fused projection keep their order.
    first = start // local.rule.sizes[parts[1]] * size
    return first, first + size


def _slice(local: LocalOp) -> tuple[Any, ...]:
    dims = local.rule.inputs[0]
    dim = local.argument(1, "dim", 0) % len(dims)
    # Start and end count in the whole tensor, and may be negative or beyond it.
    whole = local.global_shape(dims)[dim]
    ends = local.argument(2, "start"), local.argument(3, "end")
    part = _part(local, dims[dim], bounds(whole, *ends)[0])
    if part is None and local.argument(4, "step", 1) != 1:
        return local.call()
    # Within the dim: `x[:, :100]` of fewer is a slice, but no `narrow`, as which a program runs it.
    part = part or bounds(local.shape(dims)[dim], *ends)
    return (local.emit(aten.slice.Tensor, local.args[0], dim, *part),)


def _slice_backward(local: LocalOp) -> tuple[Any, ...]:
    if not local.pieces:
        return local.call()
    dims, shape = local.output_dims(), list(local.output_shape())
    dim = local.argument(2, "dim") % len(dims)
    start, end = bounds(local.global_shape(dims)[dim], *local.args[3:5])
    step = local.argument(5, "step", 1)
    part = _part(local, dims[dim], start) or (start, end)
    return local.call((local.args[0], shape, dim, *part, step))


def _split(local: LocalOp) -> tuple[Any, ...]:
    dims = local.rule.inputs[0]
    dim = local.argument(2, "dim", 0) % len(dims)
    parts = dims[dim]
    if not local.pieces.keys() & set(parts):
        return local.call()
    size = local.size(parts[-1])
    count = len(local.op.outputs)
    emitted = local.emit(aten.split_with_sizes.default, local.args[0], [size] * count, dim)
    return local.unpack(emitted)


def _repeat(local: LocalOp) -> tuple[Any, ...]:
    if not local.pieces:
        return local.call()
    given = local.argument(1, "repeats")
    # The repeats of a dim are a factor: cut, this rank makes only some of the copies.
    repeats = [local.size(f"r{i}") if n != 1 else 1 for i, n in enumerate(given)]
    return local.call((local.args[0], repeats), {})


def _repeat_interleave(local: LocalOp) -> tuple[Any, ...]:
    if not local.pieces:
        return local.call()
    count = local.argument(1, "repeats")
    count = local.size("r") if count != 1 else 1
    return local.call((local.args[0], count, local.argument(2, "dim")), {})


def _arange(local: LocalOp) -> tuple[Any, ...]:
    """arange: integers start at the offset of the piece, others are cut from the whole."""
    if not local.pieces:
        return local.call()
    args = local.args
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    # Rounding of start + i * step depends on i: a piece that starts elsewhere would differ in the last bit.
    if not all(isinstance(x, int) for x in (start, end, step)):
        return (local.keep_piece(local.call()[0]),)
    (piece,) = local.pieces.values()
    first = start + piece.offset * step
    return (
        local.emit(aten.arange.start_step, first, first + piece.size * step, step, **local.kwargs),
    )


def _cut_from_whole(local: LocalOp) -> tuple[Any, ...]:
    return (local.keep_piece(local.call()[0]),)


def _strided(local: LocalOp) -> tuple[Any, ...]:
    """empty_strided, new_empty_strided: contents are undefined, so strides matter little."""
    if not local.pieces:
        return local.call()
    shape = list(local.output_shape())
    if local.op.inputs:
        return (local.emit(aten.new_empty.default, local.args[0], shape, **local.kwargs),)
    return (local.emit(aten.empty.memory_format, shape, **local.kwargs),)


def _triangle(local: LocalOp) -> tuple[Any, ...]:
    """tril, triu: the diagonal moves with the offsets of the piece."""
    if not local.pieces:
        return local.call()
    # Element (i, j) of the piece is (i + rows, j + columns) of the whole.
    rows, columns = (local.offset(dim[0]) if dim else 0 for dim in local.rule.inputs[0][-2:])
    return local.call((local.args[0], local.argument(1, "diagonal", 0) + rows - columns), {})


FORMS: dict[str, Form] = {
    **dict.fromkeys(
        (
            "aten.view",
            "aten._unsafe_view",
            "aten.reshape",
            "aten._reshape_alias",
            "aten.flatten",
            "aten.unflatten",
            "aten._reshape_copy",
            "aten.view_copy",
        ),
        _reshape,
    ),
    "aten.view.dtype": LocalOp.call,
    "aten.squeeze": _unchanged_or_reshape,
    "aten.squeeze_copy": _unchanged_or_reshape,
    "aten.expand": _sized(1),
    "aten.expand_copy": _sized(1),
    "aten.broadcast_to": _sized(1),
    "aten.slice": _slice,
    "aten.slice_backward": _slice_backward,
    "aten.select_backward": _sized(1),
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.repeat": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.zeros": _sized(0),
    "aten.ones": _sized(0),
    "aten.full": _sized(0),
    "aten.empty": _sized(0),
    "aten.empty_permuted": _sized(0),
    "aten._efficientzerotensor": _sized(0),
    "aten.new_zeros": _sized(1),
    "aten.new_ones": _sized(1),
    "aten.new_full": _sized(1),
    "aten.new_empty": _sized(1),
    "aten.empty_strided": _strided,
    "aten.new_empty_strided": _strided,
    "aten.arange": _arange,
    "aten.linspace": _cut_from_whole,
    "aten.eye": _cut_from_whole,
    "aten.tril": _triangle,
    "aten.triu": _triangle,
}
