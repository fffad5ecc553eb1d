"""Forward and backward of one kind of batch as one callable program of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperparallel.graph.build import Built
from hyperparallel.graph.decided import decisions
from hyperparallel.runtime.exec.compiled import Compiled
from hyperparallel.runtime.job.agreement import FOR_A_CALL, agree
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.local_batch import input_cuts, local_leaves
from hyperparallel.runtime.module.micro_batches import GradientReduction
from hyperparallel.shard.spec import Spec


@dataclass
class JointProgram:
    """Loss and gradients in one call.

    built: what all ranks share. With `defer`, gradients come back pending and `finish` reduces them;
    without, `finish` changes nothing.
    """

    built: Built
    here: Here
    defer: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        mesh = self.built.decisions.mesh
        program = self.built.rank_program(self.here.rank, defer=self.defer)
        options = {"compile": self.compile, "accumulate": self.defer}
        agree(self.here, decisions(self.built, program, options), "the program of a step", FOR_A_CALL)
        self.compiled = Compiled(program, self.here.binder(mesh, program), self.compile)
        self.finish = GradientReduction(self.built, program, self.here, self.compiled.clock)
        self._input_cuts = tuple(input_cuts(program).values())
        self.param_names = list(program.params)
        self.buffer_names = list(program.buffers)
        self.grad_names = list(program.grads)
        self.stored: Mapping[str, Spec] = self.built.decisions.stored

    @property
    def compiled_programs(self) -> list[Compiled]:
        """What it runs: the program of a batch, and that of `finish` where there is one."""
        return [self.compiled] if self.finish.last is None else [self.compiled, self.finish.last]

    def run(
        self,
        leaves: Sequence[Tensor],
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        weight: float = 1.0,
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss and the gradients of `weight` times the loss, in the order of `grad_names`.

        leaves: the tensors of the global batch. params: local pieces by name. buffers are updated in
        place where the model updates them.
        """
        program = self.compiled.program
        pieces = local_leaves(leaves, self._input_cuts, self.here.device)
        values = dict(zip(program.inputs.values(), pieces, strict=True))
        values |= {name: params[path] for path, name in program.params.items()}
        values |= {name: buffers[path] for path, name in program.buffers.items()}
        for path, name in program.tangents.items():
            kind = self.built.workload.values[self.built.workload.tangents[path]].dtype
            # As the loss's gradient the weight scales all gradients, with no pass over them afterwards.
            values[name] = torch.full(
                (), weight, dtype=getattr(torch, kind), device=self.here.device
            )
        values |= self.compiled.constants({path: buffers[path] for path in program.buffers})
        results = self.compiled.run("joint", values)
        count = self.compiled.num_results
        for path, new in zip(program.mutations, results[len(program.outputs) : count], strict=True):
            # Into the model's own buffer, which others may hold.
            buffers[path].copy_(new)
        return results[0], list(results[count : count + len(program.grads)])
