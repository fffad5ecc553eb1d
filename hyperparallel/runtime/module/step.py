"""`TrainStep`: one object owns the whole step: forward, backward, accumulation, clipping, optimizer.

Forward and backward are one program, so a collective of the forward whose result only the caller wants
can travel with one of the backward, and nothing goes through autograd. With `accumulate=k` the batch is
cut in k micro-batches along dim 0 (`micro_batches.py`). The optimizer works on this rank's pieces and must
be elementwise (AdamW, SGD, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.errors import PlanError, UserError, Words
from hyperparallel.graph.build import build
from hyperparallel.graph.capture.batch_tree import call_of
from hyperparallel.graph.capture.precision import without_autocast
from hyperparallel.graph.decided import Decision
from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.exec.codegen import WaitClock
from hyperparallel.runtime.job.agreement import agree
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.choose_mesh import automatic_plan
from hyperparallel.runtime.module.clipping import check_clip, clip_gradients, copies_of
from hyperparallel.runtime.module.joint import JointProgram
from hyperparallel.runtime.module.local_batch import signature
from hyperparallel.runtime.module.micro_batches import (
    GradientSums,
    check_accumulation,
    loss_over_rows,
    micro_weights,
    shifts_labels,
    split_batch,
)
from hyperparallel.runtime.module.parallel import ParallelState, check_arguments, make_parallel, plain_twin
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.spec import Spec
from hyperparallel.workload import Workload

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """What a step reports.

    grad_norm: before clipping, NaN if not asked for. comm_seconds: how long this rank waited for
    communication; NaN on CUDA, where a wait is an event on the stream and the host goes on.
    """

    loss: float
    grad_norm: float
    comm_seconds: float = 0.0


class TrainStep:
    """A training step of `model` under `plan`; every rank of its mesh makes one and calls it alike.

    plan: "auto" takes the cheapest mesh of the job's ranks that fits their memory (`choose_mesh.py`).
    optimizer: makes a torch optimizer from (name, local parameter) pairs, for instance
        `lambda named: torch.optim.AdamW(named, lr=1e-3)`.
    example_batch: the global batch of one step (see `parallelize`). accumulate: micro-batches per step.
    clip: largest global gradient norm. loss: path of the loss in the model's result (by default the
        one called loss, or the only one). reduction: "mean" or "sum" says how the losses of micro-batches are
        put together where the program doesn't tell (a mean weighs them by valid labels, or rows); a ratio
        of two sums is then as near as these weights are. compile: send compute through Inductor.
    The model's parameters are presented as DTensors that share memory with what the step updates.

    >>> import torch, hyperparallel as hp
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0), torch.nn.Softplus())
    >>> class Mean(torch.nn.Module):
    ...     def __init__(self, inner):
    ...         super().__init__()
    ...         self.inner = inner
    ...     def forward(self, x):
    ...         return {"loss": self.inner(x).mean()}
    >>> plan = hp.Plan(hp.Layout((1,), ("dp",)))  # in a job: a mesh of its ranks
    >>> step = hp.TrainStep(Mean(model), lambda named: torch.optim.SGD(named, lr=0.1), plan, torch.ones(8, 4))
    >>> first, second = step(torch.ones(8, 4)), step(torch.ones(8, 4))
    >>> second.loss < first.loss
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        plan: Plan | Literal["auto"],
        example_batch: Any,
        *,
        accumulate: int = 1,
        clip: float | None = None,
        loss: str = "",
        reduction: str | None = None,
        compile: bool = False,
        here: Here | None = None,
    ) -> None:
        if plan != "auto":
            check_arguments(model, plan)
        check_accumulation(accumulate, reduction)
        check_clip(clip)
        if plan == "auto":
            check_arguments(model, Plan(Mesh((1,), ("dp",))))
            args, kwargs = call_of(split_batch(example_batch, accumulate)[0])
            plan = automatic_plan(model, args, kwargs, loss=loss, micro_batches=accumulate)
        assert isinstance(plan, Plan)
        self.shifted = shifts_labels(model)
        self.loss, self.accumulate, self.clip, self.compile = loss, accumulate, clip, compile
        self.compute = plan.compute
        self.here = here or Here.in_job(plan.mesh)
        self.defer = accumulate > 1
        self.model = model
        self.state = ParallelState(self.here)
        self._programs: dict[Any, JointProgram] = {}
        self.program = self._build(model, split_batch(example_batch, accumulate)[0], plan)
        built = self.program.built
        self.over = loss_over_rows(
            reduction, accumulate, example_batch, (built.workload, built.rules), self._rules_of(plan)
        )
        make_parallel(model, self.state, self.program.built)
        self.params = {
            # Plain tensors over the DTensors' memory: an optimizer pays no DTensor dispatch.
            name: nn.Parameter(local_of(self.model.get_parameter(name))) for name in self.program.param_names
        }
        self.specs: Mapping[str, Spec] = self.program.stored
        self.trained = list(self.program.grad_names)
        named = [(name, self.params[name]) for name in self.trained]
        self.optimizer = made_optimizer(optimizer, named)
        options = [("option clip", str(clip)), ("option reduction", str(reduction))]
        agree(self.here, [*options, *update_settings(self.optimizer, named)], "the update of a step")
        self._replicas = [copies_of(self.specs[name]) for name in self.trained]
        self._norm_clock = WaitClock()

    def __call__(self, batch: Any) -> StepResult:
        return self.step(batch)

    def step(self, batch: Any) -> StepResult:
        """One update from a global batch; returns the loss of the batch before it."""
        waited = self._waited()
        losses = self.gradients(batch)
        norm = math.nan if self.clip is None else self._clip(self.clip)
        self.optimizer.step()
        for name in self.trained:
            # Dropped, not zeroed: the next step's first gradient takes its place without an addition.
            self.params[name].grad = None
        # Here the host waits for a device.
        return StepResult(float(losses), float(norm), self._waited() - waited)

    def _clip(self, limit: float) -> Tensor:
        grads = [g for n in self.trained if (g := self.params[n].grad) is not None]
        return clip_gradients(grads, self._replicas, limit, self.here, self._norm_clock)

    def _waited(self) -> float:
        run = sum(program.compiled.clock.seconds for program in self._programs.values())
        return host_seconds(run + self._norm_clock.seconds, self.here.device)

    def gradients(self, batch: Any) -> Tensor:
        """Set `.grad` of the local parameters from a global batch; returns the loss (0-dim tensor)."""
        with without_autocast(self.compute, self.here.device.type):
            return self._gradients(batch)

    def _gradients(self, batch: Any) -> Tensor:
        micros = split_batch(batch, self.accumulate)
        weights = micro_weights(micros, self.over, self.shifted)
        sums = GradientSums()
        loss = torch.zeros((), device=self.here.device)
        for micro, weight in zip(micros, weights, strict=True):
            # No label of it counts: its mean is 0 / 0, and NaN * 0 is NaN.
            if weight == 0.0 and len(micros) > 1:
                continue
            program, leaves = self._program(micro)
            part, grads = program.run(leaves, self.params, self._buffers(program), weight)
            loss = loss + part * weight
            sums.add(program.finish, grads)
        for name, grad in zip(self.trained, sums.finished(), strict=True):
            self.params[name].grad = grad
        return loss

    def _buffers(self, program: JointProgram) -> dict[str, Tensor]:
        return {name: self.model.get_buffer(name) for name in program.buffer_names}

    def _build(self, model: nn.Module, batch: Any, plan: Plan, later: bool = False) -> JointProgram:
        args, kwargs = call_of(batch)
        device, parts = self.here.device, self.accumulate
        built = build(
            model, plan, args, kwargs, loss=self.loss, micro_batches=parts, later=later, device=device
        )
        (found,) = (built.workload.values[value] for value in built.workload.outputs.values())
        if found.shape or not built.workload.grads:
            kind = f"{found.dtype} of shape {list(found.shape)}"
            raise PlanError("loss", kind, "one number that depends on a trained parameter")
        leaves = built.captured.flatten_inputs(args, kwargs)
        program = JointProgram(built, self.here, self.defer, self.compile)
        self._programs[signature(leaves)] = program
        return program

    def _rules_of(self, plan: Plan) -> Callable[[Any], tuple[Workload, Mapping[str, Rule]]]:
        def of(batch: Any) -> tuple[Workload, Mapping[str, Rule]]:
            args, kwargs = call_of(batch)
            built = build(self.model, plan, args, kwargs, loss=self.loss, device=self.here.device)
            return built.workload, built.rules

        return of

    def _program(self, batch: Any) -> tuple[JointProgram, list[Tensor]]:
        """The program for a batch of this shape, and the batch's tensors."""
        args, kwargs = call_of(batch)
        leaves = self.program.built.captured.flatten_inputs(args, kwargs)
        found = self._programs.get(signature(leaves))
        if found is None:
            assert self.state.plan is not None
            found = self._build(plain_twin(self.model), batch, self.state.plan, later=True)
        return found, leaves


def host_seconds(seconds: float, device: torch.device) -> float:
    """Seconds that the host has waited; NaN on CUDA, where the stream waits and the host goes on."""
    return math.nan if device.type == "cuda" else seconds


def made_optimizer(make: Any, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The user's optimizer of these parameters."""
    allowed = "a function that makes a torch optimizer from a list of (name, parameter)"
    instead = "lambda named: torch.optim.AdamW(named)"
    if not callable(make):
        raise UserError("optimizer", type(make).__name__, allowed, instead)
    made = make(named)
    if not hasattr(made, "step") or not hasattr(made, "param_groups"):
        given = Words(f"a function that returns {type(made).__name__}")
        raise UserError("optimizer", given, allowed, instead)
    return made  # type: ignore[no-any-return]


def update_settings(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> Iterator[Decision]:
    """What must be equal on all ranks that hold these parameters, or their copies drift apart.

    By parameter, not by group: ranks of other parts have other groups.
    """
    yield "optimizer", type(optimizer).__name__
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in named:
        for key, value in sorted(group_of.get(id(parameter), {}).items()):
            if isinstance(value, (bool, int, float, str, tuple, Tensor)):
                yield f"{key} of {name}", str(value)


def local_of(parameter: Tensor) -> Tensor:
    """This rank's piece of a parameter, sharing its memory."""
    plain = parameter.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
