"""Local tensors presented as DTensors, the interchange type of parameters.

Programs run on plain local tensors; optimizers, checkpoints and other libraries see a parameter as a
DTensor over a `DeviceMesh` with the plan's axes. DTensor deals the axes of one dim in mesh order and
torch.chunk pieces. So the axes of the `DeviceMesh` stand in an order that agrees with every cut where
there is one; all parameters must share a mesh, or torch could not compute a norm over them. Where cuts
contradict each other, some are `_StridedShard` placements, which say the other order
(`shard/axis_orders.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # checked on torch 2.13

from hyperparallel.errors import LayoutError
from hyperparallel.layout import Mesh
from hyperparallel.runtime.comm.groups import new_process_group
from hyperparallel.shard.axis_orders import axis_order, is_said_by_strides, split_factors
from hyperparallel.shard.spec import Spec, piece

Cuts = tuple[tuple[int, int, int], ...]
"""(dim, start, length) wherever a rank holds less than everything."""


@dataclass(frozen=True)
class Presenter:
    """Presents the tensors of one plan. mesh: the plan's, its axes in the order of `device_mesh`."""

    mesh: Mesh
    device_mesh: DeviceMesh

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        specs: Iterable[Spec],
        device: torch.device,
        process_group: Callable[[Sequence[int]], dist.ProcessGroup] = new_process_group,
    ) -> Presenter:
        """The presenter of a mesh and of the tensors to come; every rank of the mesh must call this together.

        process_group: gives the process group of this rank's group along one axis.
        Raises `LayoutError` where ranks do not ascend along an axis: a process group sorts its ranks, so
        DTensor would put gathered pieces together in another order than it cut them (torch 2.13).
        """
        ranks = torch.tensor(mesh.ranks).view(mesh.shape)
        if any(bool((ranks.diff(dim=dim) < 0).any()) for dim in range(ranks.dim())):
            allowed = "ranks that ascend along every axis, in a plan that runs"
            raise LayoutError("mesh.ranks", mesh.ranks, allowed)
        order = axis_order(mesh, specs)
        ranks = ranks.permute([mesh.axis_index(name) for name in order]).contiguous()
        names = tuple(name.replace(".", "_") for name in order)
        ordered = Mesh(tuple(ranks.shape), order, ranks.flatten().tolist())
        if not dist.is_initialized():  # alone: private options that ask for no group (torch 2.13)
            alone = DeviceMesh(device.type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
            return cls(ordered, alone)
        made = [process_group(ordered.group(dist.get_rank(), axis)) for axis in order]
        # A DeviceMesh that made its own groups would need every rank of the job, also those of other meshes.
        return cls(ordered, DeviceMesh.from_group(made, device.type, ranks, mesh_dim_names=names))

    def placements(self, spec: Spec, name: str = "tensor") -> tuple[Placement, ...]:
        """The placements of a layout, one per axis; `LayoutError` where DTensor cannot say it."""
        layout = spec.layout()
        found: dict[str, Placement] = {axis: Partial(op) for axis, op in layout.partial}
        for dim, (axes, size) in enumerate(zip(layout.dims, spec.shape, strict=True)):
            factors = split_factors(self.mesh, axes)
            if max(factors, default=1) > 1 and not is_said_by_strides(self.mesh, axes, size):
                order = tuple(sorted(axes, key=self.mesh.axis_index))
                parts = math.prod(map(self.mesh.axis_size, axes))
                allowed = (
                    f"the order {order}, which other cuts have, or a size that {parts} divides instead of "
                    f"{size}: DTensor has no placements for uneven pieces in two orders"
                )
                raise LayoutError(f"{name}, dim {dim}", axes, allowed)
            for axis, factor in zip(axes, factors, strict=True):
                found[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        return tuple(found.get(axis, Replicate()) for axis in self.mesh.names)

    def present(self, local: Tensor, spec: Spec, name: str = "tensor") -> DTensor:
        """A local tensor as the DTensor it is a piece of; no communication."""
        shape = torch.Size(spec.shape)
        return DTensor.from_local(
            local,
            self.device_mesh,
            self.placements(spec, name),
            # A check would be a collective for each tensor.
            run_check=False,
            # Told, since from local sizes torch would take every piece for an even one.
            shape=shape,
            stride=_contiguous_stride(shape),
        )


def cuts(spec: Spec, rank: int) -> Cuts:
    """Where in the whole tensor the piece lies that `rank` holds under a plain spec."""
    at = spec.mesh.coordinate(rank)
    found = []
    for dim, factors in enumerate(spec.dims):
        size, axes = factors[0]
        if axes:
            assert len(factors) == 1, "sources are laid out plainly"
            found.append((dim, *piece(size, axes, spec.mesh, at)))
    return tuple(found)


def narrowed(whole: Tensor, where: Cuts) -> Tensor:
    """The piece of a whole tensor (a view)."""
    for dim, start, length in where:
        whole = whole.narrow(dim, start, length)
    return whole


def local_piece(whole: Tensor, spec: Spec, rank: int) -> Tensor:
    """The piece of a whole tensor that `rank` holds under a plain spec (a view)."""
    return narrowed(whole, cuts(spec, rank))


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
