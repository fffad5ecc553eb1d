"""This process's place in a mesh: its rank, its device and the groups that programs communicate in.

A job may hold several meshes, and a mesh need not hold every rank of the job. What is done here is done by
the ranks of the mesh and by no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyperparallel.errors import PlanError
from hyperparallel.graph.program import RankProgram
from hyperparallel.layout import Mesh
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.group import Bind, Group, job_device
from hyperparallel.runtime.comm.groups import Groups


@dataclass(frozen=True)
class Here:
    """One rank of a mesh in this process. rank: the job's number of it, as in `mesh.ranks`."""

    rank: int
    mesh: Mesh
    device: torch.device
    groups: Groups

    @classmethod
    def in_job(cls, mesh: Mesh, groups: Groups | None = None) -> Here:
        """This process in the default process group (or alone, without one); only ranks of `mesh` call this.

        Raises `PlanError` for a mesh with ranks that the job does not have, or without this rank.
        """
        joined = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size() if joined else 1
        rank = dist.get_rank() if joined else 0
        if max(mesh.ranks) >= size:
            raise PlanError("mesh", str(mesh), f"a mesh of the job's {size} ranks (0 to {size - 1})")
        if rank not in mesh.ranks:
            rest = f"only ranks of the mesh in this call, and this is rank {rank} of the job's {size}"
            instead = f"a mesh with ranks=(..., {rank}), or `if rank in mesh.ranks:` around the call"
            raise PlanError("mesh", str(mesh), rest, instead)
        # By what the job is made of, not by what the machine has; alone by the machine.
        device = torch.device("cpu")
        if (job_device() == "cuda") if joined else torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if groups is None:
            groups = Groups.of_default() if joined else Groups(0, 1)
        return cls(rank, mesh, device, groups)

    @property
    def is_first(self) -> bool:
        """Whether this is the mesh's first rank, the one that talks."""
        return self.rank == self.mesh.ranks[0]

    @property
    def mesh_group(self) -> Group:
        """The group of all ranks of the mesh; the first use is collective over them."""
        self.groups.ensure([self.mesh.ranks])
        return self.groups.get(self.mesh.ranks)

    def barrier(self) -> None:
        """Wait until every rank of the mesh is here."""
        # On the CPU in a CUDA job too: it is the host that waits, no stream.
        collectives.wait(collectives.all_reduce_start(torch.zeros(1), "sum", self.mesh_group))

    def binder(self, mesh: Mesh, program: RankProgram) -> Bind:
        """Make the groups that a program needs (all ranks of the mesh together).

        Returns axes -> this rank's group. mesh: this one, or this one with axes split in two.
        """
        spans = dict.fromkeys(transfer.axes for transfer in program.transfers())
        self.connect(mesh, spans)
        return lambda axes: self.groups.get(mesh.group(self.rank, axes))

    def connect(self, mesh: Mesh, spans: Iterable[tuple[str, ...]]) -> None:
        """Make this rank's group along each of the given axes; the other members ask for the same."""
        self.groups.ensure([mesh.group(self.rank, axes) for axes in spans])
