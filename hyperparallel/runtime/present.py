"""Local tensors presented as DTensors, the interchange type of parameters.

Programs run on plain local tensors; optimizers, checkpoints and other libraries see a parameter as a
DTensor over a `DeviceMesh` with the plan's axes. DTensor deals the axes of one dim in mesh order and
torch.chunk pieces, which a `Layout` agrees with as long as its axes on a dim stand in mesh order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hyperparallel.errors import LayoutError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.layout.placement import placements
from hyperparallel.shard.spec import Spec, piece


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The `DeviceMesh` of a mesh; every rank of the job must call this together.

    Raises `LayoutError` where ranks do not ascend along an axis: a process group sorts its ranks, so
    DTensor would put gathered pieces together in another order than it cut them (torch 2.13).
    """
    ranks = torch.tensor(mesh.ranks).view(mesh.shape)
    if any(bool((ranks.diff(dim=dim) < 0).any()) for dim in range(ranks.dim())):
        allowed = "ranks that ascend along every axis, in a plan that runs"
        raise LayoutError("mesh.ranks", mesh.ranks, allowed)
    names = tuple(name.replace(".", "_") for name in mesh.names)
    if not dist.is_initialized():  # alone: private options that ask for no group (torch 2.13)
        return DeviceMesh(device.type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
    return DeviceMesh(device.type, ranks, mesh_dim_names=names)


def dtensor_placements(layout: Layout) -> tuple[Placement, ...]:
    """The placements of a layout, one per mesh axis; `LayoutError` where DTensor cannot say it."""
    kinds = {"replicate": Replicate, "shard": Shard, "partial": Partial}
    return tuple(kinds[kind](*rest) for kind, *rest in placements(layout))


def present(local: Tensor, spec: Spec, mesh: DeviceMesh) -> DTensor:
    """A local tensor as the DTensor it is a piece of; no communication."""
    shape = torch.Size(spec.shape)
    return DTensor.from_local(
        local,
        mesh,
        dtensor_placements(spec.layout()),
        run_check=False,
        shape=shape,
        stride=_contiguous_stride(shape),
    )


def local_piece(whole: Tensor, spec: Spec, rank: int) -> Tensor:
    """The piece of a whole tensor that `rank` holds under a plain spec (a view)."""
    at = spec.mesh.coordinate(rank)
    for dim, factors in enumerate(spec.dims):
        size, axes = factors[0]
        if axes:
            assert len(factors) == 1, "sources are laid out plainly"
            start, length = piece(size, axes, spec.mesh, at)
            whole = whole.narrow(dim, start, length)
    return whole


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
