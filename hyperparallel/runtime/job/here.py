"""This process's place in the job: its rank, its device and the groups that programs communicate in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyperparallel.errors import PlanError
from hyperparallel.graph.program import RankProgram
from hyperparallel.layout import Mesh
from hyperparallel.runtime.comm.group import job_device
from hyperparallel.runtime.comm.groups import Groups
from hyperparallel.runtime.exec.codegen import Bind


@dataclass(frozen=True)
class Here:
    """One rank of a plan's mesh in this process."""

    rank: int
    world_size: int
    device: torch.device
    groups: Groups

    @classmethod
    def in_job(cls, mesh: Mesh, groups: Groups | None = None) -> Here:
        """This process in the default process group (or alone, without one).

        Raises `PlanError` when the mesh does not have as many ranks as the job.
        """
        joined = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size() if joined else 1
        if sorted(mesh.ranks) != list(range(size)):
            raise PlanError(
                "mesh", str(mesh), f"a mesh of the job's {size} ranks (0 to {size - 1})"
            )
        rank = dist.get_rank() if joined else 0
        device = torch.device("cpu")
        if (job_device() == "cuda") if joined else torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if groups is None:
            groups = Groups.of_default() if joined else Groups(0, 1)
        return cls(rank, size, device, groups)

    def binder(self, mesh: Mesh, program: RankProgram) -> Bind:
        """Make the groups that a program needs (all ranks together); returns axes -> this rank's group."""
        spans = dict.fromkeys(transfer.axes for transfer in program.transfers())
        self.connect(mesh, spans)
        return lambda axes: self.groups.get(mesh.group(self.rank, axes))

    def connect(self, mesh: Mesh, spans: Iterable[tuple[str, ...]]) -> None:
        """Make the groups along the given axes; every rank must ask for the same."""
        self.groups.ensure(ranks for axes in spans for ranks in mesh.groups(axes))
