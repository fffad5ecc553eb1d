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
from hyperparallel.runtime.module.local_batch import local_inputs
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
        self._finish: Compiled | None = None
        if any(spec.partial for spec in program.grad_specs.values()):
            last = self.built.reduction_program(program)
            self._finish = Compiled(last, self.here.binder(mesh, last))
        self.param_names = list(program.params)
        self.buffer_names = list(program.buffers)
        self.grad_names = list(program.grads)
        self.stored: Mapping[str, Spec] = self.built.decisions.stored

    @property
    def compiled_programs(self) -> list[Compiled]:
        """What it runs: the program of a batch, and that of `finish` where there is one."""
        return [self.compiled] if self._finish is None else [self.compiled, self._finish]

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
        values = local_inputs(program, leaves, self.here)
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

    def finish(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients summed over micro-batches, in the layouts their parameters are stored in."""
        if self._finish is None:
            return list(grads)
        names = self._finish.program.inputs.values()
        return list(self._finish.run("joint", dict(zip(names, grads, strict=True))))
