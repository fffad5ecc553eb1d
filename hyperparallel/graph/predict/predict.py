"""A training step that was built but never run, on the clock of a cluster: its predicted timeline.

The ranks' programs are the ones that would run (`instructions.py`), so a prediction has the same actions in
the same order as a traced run. Ranks that are threads of one machine are all simulated, because they share
cores; of other meshes of more than `FEW` ranks the first rank stands for all.

Leaves out what a runtime does around its programs (cutting batches).
"""

from __future__ import annotations

from dataclasses import replace

from hyperparallel.cluster import Cluster
from hyperparallel.graph.build import Built
from hyperparallel.graph.predict.instructions import step_instructions
from hyperparallel.graph.predict.update_work import FUSED_ADAM, UpdateWork
from hyperparallel.simulate import Timeline, step_timeline

FEW = 8


def predicted_step(
    built: Built, cluster: Cluster, *, runs: int = 1, clip: bool = True, update: UpdateWork = FUSED_ADAM
) -> Timeline:
    """The timeline of one step of `TrainStep` on a cluster; arguments as of `step_instructions`."""
    mesh = built.decisions.mesh
    # Threads of one machine slow each other down, so that none stands for the others.
    ranks = mesh.ranks if cluster.device.threads is not None or mesh.size <= FEW else mesh.ranks[:1]
    programs = {rank: step_instructions(built, rank, runs=runs, clip=clip, update=update) for rank in ranks}
    facts = {"cluster": cluster.name, "mesh": str(mesh), "model": built.model_hash}
    return replace(step_timeline(programs, cluster, mesh), facts=facts)
