"""What a checkpoint holds: named tensors, each a plain local tensor with the layout it is cut by.

A state is a flat dict of names to values. A value is a `Local` (tensor, layout, global shape), a
DTensor, or a plain tensor, which counts as whole and equal on every rank. All become `Local`s, so
there is one path for parameters, optimizer moments and random state, on any mesh, with uneven and
empty pieces. Which of several ranks that hold the same piece writes it follows from the layout and
the name alone: ranks need not talk to agree, and the writing is spread over the replicas.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # checked on torch 2.13

from hyperparallel.errors import CheckpointError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.layout.carried import check_stored
from hyperparallel.shard.axis_orders import is_said_by_strides, order_from_factors


@dataclass(frozen=True, eq=False)
class Local:
    """This rank's piece of a tensor of global `shape`; layout None: whole, equal on every rank.

    A rank outside the layout's mesh holds nothing: its `tensor` is ignored, but listing the name
    there too tells a strict load that the name is known.
    """

    tensor: torch.Tensor
    layout: Layout | None
    shape: tuple[int, ...]

    @staticmethod
    def of_rank(tensor: torch.Tensor, rank: int) -> Local:
        """A whole tensor that `rank` alone has, such as its random state."""
        mesh = Mesh((1,), ("own",), (rank,))
        return Local(tensor, mesh(*(None for _ in tensor.shape)), tuple(tensor.shape))


StateValue = torch.Tensor | Local
CheckpointState = Mapping[str, StateValue]


@dataclass(frozen=True, eq=False)
class LocalPiece:
    """A `Local` seen from one rank: where its piece begins, and whether this rank writes it."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_held: bool
    is_writer: bool
    is_private: bool


def pieces_of(state: CheckpointState, rank: int, world: int) -> dict[str, LocalPiece]:
    """Every value of `state` as rank `rank` of `world` holds it.

    Raises `CheckpointError` for a layout with a pending reduction or in another memory, or whose tensor does
    not have the shape that its layout gives this rank.
    """
    return {name: _piece(name, value, rank, world) for name, value in state.items()}


def as_local(name: str, value: StateValue) -> Local:
    """A DTensor or plain tensor as a `Local`; raises `CheckpointError` for pending placements."""
    if isinstance(value, Local):
        return value
    if not isinstance(value, DTensor):
        return Local(value.detach(), None, tuple(value.shape))
    device_mesh = value.device_mesh
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim))
    mesh = Mesh(tuple(device_mesh.mesh.shape), names, tuple(device_mesh.mesh.flatten().tolist()))
    # Placements stand by axis; a layout wants axes by dim, in the order in which they cut it.
    factors: list[list[tuple[str, int]]] = [[] for _ in value.shape]
    for axis, placement in zip(names, value.placements, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            factors[placement.dim].append((axis, getattr(placement, "split_factor", 1)))
        elif not isinstance(placement, Replicate):
            raise CheckpointError(name, str(placement), "Shard or Replicate", "a redistributed one")
    dims = [order_from_factors(mesh, found) for found in factors]
    for axes, size in zip(dims, value.shape, strict=True):
        if axes is None or not is_said_by_strides(mesh, axes, size):
            raise CheckpointError(name, str(value.placements), "one run of rows on every rank")
    return Local(value.to_local().detach(), mesh(*(axes or () for axes in dims)), tuple(value.shape))


def _piece(name: str, value: StateValue, rank: int, world: int) -> LocalPiece:
    local = as_local(name, value)
    layout, shape = local.layout, tuple(local.shape)
    if layout is not None:
        check_stored(layout, f"{name}.layout", CheckpointError)
    if layout is None:
        offset, size, copy, copies = (0,) * len(shape), shape, rank, world
    elif rank not in layout.mesh.ranks:
        return LocalPiece(local.tensor, shape, (0,) * len(shape), False, False, layout.mesh.size == 1)
    else:
        bounds = layout.slices(shape, rank)
        offset = tuple(bound.start for bound in bounds)
        size = tuple(bound.stop - bound.start for bound in bounds)
        copy, copies = _replica(layout, rank)
    if tuple(local.tensor.shape) != size:
        allowed = f"{list(size)}, rank {rank}'s piece of {list(shape)} under {layout or 'none'}"
        raise CheckpointError(name, list(local.tensor.shape), allowed)
    # Not `hash`, which differs from process to process: ranks choose alike without talking.
    is_writer = copy == zlib.crc32(name.encode()) % copies
    is_private = layout is not None and layout.mesh.size == 1 and world > 1
    return LocalPiece(local.tensor, shape, offset, True, is_writer, is_private)


def _replica(layout: Layout, rank: int) -> tuple[int, int]:
    """Which copy of its piece a rank holds, and how many copies there are."""
    cut = {axis for axes in layout.dims for axis in axes}
    coordinate = layout.mesh.coordinate(rank)
    copy, copies = 0, 1
    for axis in layout.mesh.names:
        if axis not in cut:
            size = layout.mesh.axis_size(axis)
            copy, copies = copy * size + coordinate[axis], copies * size
    return copy, copies


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a host tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
