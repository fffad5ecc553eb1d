"""`PartsStep`: one training step of a model whose parts run on meshes of their own, in one job.

The model is captured once for a kind of batch and cut by modules (`graph/passes/split.py`). Each part has its
plan, its programs and its share of the optimizer's state; activations go from mesh to mesh with the forward,
their gradients back with the backward, each laid out anew on the way (`edges.py`). A rank runs the parts
whose mesh it is in, none or several, and holds no memory for the parameters of others.

One micro-batch at a time goes through all parts. Leaves out schedules that keep all meshes busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hyperparallel.errors import PlanError, UserError, Words
from hyperparallel.graph.capture.batch_tree import call_of
from hyperparallel.graph.capture.precision import without_autocast
from hyperparallel.graph.parts import BuiltParts, Part, build_parts
from hyperparallel.layout import Mesh
from hyperparallel.plan.decide import pinned
from hyperparallel.runtime.exec.codegen import WaitClock
from hyperparallel.runtime.job.agreement import agree
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.as_dtensor import Presenter, local_piece
from hyperparallel.runtime.module.clipping import check_clip, clip_gradients, copies_of
from hyperparallel.runtime.module.fast_path.held_tensors import set_parameter
from hyperparallel.runtime.module.local_batch import signature
from hyperparallel.runtime.module.micro_batches import (
    GradientSums,
    check_accumulation,
    loss_over_rows,
    micro_weights,
    shifts_labels,
    split_batch,
)
from hyperparallel.runtime.module.parallel import PlacedModule, check_arguments, mixed_into, plain_twin
from hyperparallel.runtime.module.part_programs import Lent, PartsPrograms
from hyperparallel.runtime.module.step import (
    MakeOptimizer,
    StepResult,
    host_seconds,
    local_of,
    made_optimizer,
    update_settings,
)
from hyperparallel.shard.spec import Spec


class PartsModule(PlacedModule):
    """Mixed into the class of a model whose parts run on meshes of their own; see `PartsStep`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 -- as any module's
        """Refused: no rank holds the whole model."""
        allowed = "PartsStep.step to train and PartsStep.evaluate for a loss: no rank holds the whole model"
        raise UserError("model", "a call of a model in parts", allowed, "step.evaluate(batch)")


class PartsStep:
    """A training step of `model` in parts; every rank of some part makes one and calls it alike.

    optimizer: as for `TrainStep`; called on each rank with the parameters of its own parts. parts: by name,
        in the order in which the forward goes through them. A parameter that several parts use belongs to the
        first of them, and is sent to the others once a step. example_batch, accumulate, clip, loss,
        reduction, compile: as for `TrainStep`; every rank passes the same global batch.
    The model's parameters become DTensors on the mesh of their part, and have no memory ("meta") on
    ranks of other parts, like the buffers that another part changes. Random numbers (dropout) are those of
    one device where the generators of all ranks start alike. Raises `PlanError` for parts that cannot be cut
    so, or on a rank of no part.

    >>> import torch
    >>> from hyperparallel import Layout, Plan
    >>> class Summed(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.front, self.back = nn.Linear(2, 3), nn.Linear(3, 1)
    ...     def forward(self, x):
    ...         return self.back(self.front(x)).sum()
    >>> alone = Plan(Layout((1,), ("dp",)))
    >>> parts = {"front": Part(["front"], alone), "back": Part(["back"], alone)}
    >>> step = PartsStep(Summed(), lambda named: torch.optim.SGD(named, lr=0.1), parts, torch.ones(4, 2))
    >>> step.step(torch.ones(4, 2)).loss > step.step(torch.ones(4, 2)).loss
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        parts: Mapping[str, Part],
        example_batch: Any,
        *,
        accumulate: int = 1,
        clip: float | None = None,
        loss: str = "",
        reduction: str | None = None,
        compile: bool = False,
    ) -> None:
        _check_parts(model, parts)
        check_accumulation(accumulate, reduction)
        check_clip(clip)
        self.names, self.model, self.parts = tuple(parts), model, tuple(parts.values())
        self.loss, self.accumulate, self.clip, self.compile = loss, accumulate, clip, compile
        self.shifted = shifts_labels(model)
        self.compute = self.parts[0].plan.compute
        ranks = sorted({rank for part in self.parts for rank in part.plan.mesh.ranks})
        self.here = Here.in_job(Mesh((len(ranks),), ("parts",), ranks))
        self._programs: dict[Any, PartsPrograms] = {}
        first = self._build(model, split_batch(example_batch, accumulate)[0], later=False)
        self.built, self.programs = first.built, first.programs
        whole = self.built.workload, self.built.rules
        self.over = loss_over_rows(reduction, accumulate, example_batch, whole, self._work_of)
        self.parts = tuple(
            Part(part.modules, pinned(each.decisions))
            for part, each in zip(self.parts, self.built.built, strict=True)
        )
        self.specs: Mapping[str, Spec] = {
            name: spec for each in self.built.built for name, spec in each.decisions.stored.items()
        }
        self.changed_buffers: Mapping[str, Mesh] = {
            name: each.decisions.mesh for each in self.built.built for name in each.captured.mutations
        }
        self._place()
        self.params = {
            name: nn.Parameter(local_of(model.get_parameter(name)))
            for program in self.programs.values()
            for name in program.program.params
        }
        self.trained = [name for program in self.programs.values() for name in program.trained]
        self._norm_clock = WaitClock()
        self._copies = [copies_of(self.specs[name]) for name in self.trained]
        named = [(name, self.params[name]) for name in self.trained]
        self.optimizer = made_optimizer(optimizer, named) if named else None
        self._agree_on_update(reduction)

    def _agree_on_update(self, reduction: str | None) -> None:
        options = [("option clip", str(self.clip)), ("option reduction", str(reduction))]
        agree(self.here, options, "the update of a step")
        for part, program in self.programs.items():
            if self.optimizer is not None and program.trained:
                named = [(name, self.params[name]) for name in program.trained]
                about = f"the update of part {self.names[part]}"
                agree(program.here, [*update_settings(self.optimizer, named)], about)

    def __call__(self, batch: Any) -> StepResult:
        return self.step(batch)

    def step(self, batch: Any) -> StepResult:
        """One update from a global batch; every rank gets its loss before the update."""
        waited = self._waited()
        with without_autocast(self.compute, self.here.device.type):
            loss = self._gradients(batch)
        norm: float | Tensor = math.nan
        if self.clip is not None:
            grads = [grad for name in self.trained if (grad := self.params[name].grad) is not None]
            norm = clip_gradients(grads, self._copies, self.clip, self.here, self._norm_clock)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return StepResult(float(loss), float(norm), self._waited() - waited)

    def evaluate(self, batch: Any) -> float:
        """The loss of a global batch with all modules in evaluation mode; every rank gets it."""
        with without_autocast(self.compute, self.here.device.type):
            programs, leaves = self._program(batch, train=False)
            found = programs.told(programs.forward(leaves, self.params, self._buffers(), {}))
        return float(found)

    def _waited(self) -> float:
        run = sum(programs.waited_seconds for programs in self._programs.values())
        return host_seconds(run + self._norm_clock.seconds, self.here.device)

    def _gradients(self, batch: Any) -> Tensor:
        """Set `.grad` of this rank's parameters from a global batch; returns the loss."""
        micros = split_batch(batch, self.accumulate)
        weights = micro_weights(micros, self.over, self.shifted)
        sums = {part: GradientSums() for part in self.programs}
        lent: Lent = {}
        loss: Tensor | None = None
        for micro, weight in zip(micros, weights, strict=True):
            if weight == 0.0 and len(micros) > 1:
                continue
            programs, leaves = self._program(micro)
            found = programs.forward(leaves, self.params, self._buffers(), lent)
            if found is not None:
                loss = found * weight if loss is None else loss + found * weight
            for part, grads in programs.backward(weight).items():
                sums[part].add(programs.programs[part].finish, grads)
        for part, program in self.programs.items():
            for name, grad in zip(program.trained, sums[part].finished(), strict=True):
                self.params[name].grad = grad
        return programs.told(loss)

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def _program(self, batch: Any, train: bool = True) -> tuple[PartsPrograms, list[Tensor]]:
        """The programs for a batch of this shape, and the batch's tensors."""
        args, kwargs = call_of(batch)
        leaves = self.built.captured.flatten_inputs(args, kwargs)
        found = self._programs.get((train, signature(leaves)))
        if found is None:
            found = self._build(plain_twin(self.model), batch, train=train)
        return found, leaves

    def _build(
        self, model: nn.Module, batch: Any, *, train: bool = True, later: bool = True
    ) -> PartsPrograms:
        built = self._built(model, batch, train=train, later=later)
        args, kwargs = call_of(batch)
        leaves = built.captured.flatten_inputs(args, kwargs)
        programs = PartsPrograms(built, self.here, defer=self.accumulate > 1, compile=self.compile)
        self._programs[train, signature(leaves)] = programs
        return programs

    def _built(self, model: nn.Module, batch: Any, *, train: bool = True, later: bool = False) -> BuiltParts:
        args, kwargs = call_of(batch)
        built = build_parts(
            model, self.parts, args, kwargs, loss=self.loss, train=train,
            micro_batches=self.accumulate, later=later, device=self.here.device,
        )  # fmt: skip
        if later:
            self._check_holders(built)
        (found,) = (built.workload.values[value] for value in built.workload.outputs.values())
        if found.shape or (train and not built.workload.grads):
            kind = f"{found.dtype} of shape {list(found.shape)}"
            raise PlanError("loss", kind, "one number that depends on a trained parameter")
        return built

    def _check_holders(self, built: BuiltParts) -> None:
        """Refuse a further program in which a parameter belongs to a part that does not hold it."""
        holder = {name: i for i, each in enumerate(self.built.built) for name in each.decisions.stored}
        for i, each in enumerate(built.built):
            for name in each.decisions.stored:
                if holder.get(name) != i:
                    given = Words(f"one in which part {self.names[i]} is the first to use {name}")
                    allowed = "batches for which the same part as with example_batch is the first to use it"
                    raise PlanError("batch", given, allowed)

    def _work_of(self, batch: Any) -> Any:
        built = self._built(self.model, batch)
        return built.workload, built.rules

    def _place(self) -> None:
        """Give the model this rank's pieces, and no memory for what other parts hold."""
        own: dict[str, nn.Parameter] = {}
        for part, program in self.programs.items():
            decided, here = self.built.built[part].decisions, program.here
            here.connect(decided.mesh, [(axis,) for axis in decided.mesh.names])
            specs = decided.stored
            presenter = Presenter.of(decided.mesh, specs.values(), here.device, here.groups.process_group)
            for name, spec in specs.items():
                held = self.model.get_parameter(name)
                piece = local_piece(held.detach(), spec, here.rank).to(here.device).clone()
                own[name] = nn.Parameter(presenter.present(piece, spec, name), held.requires_grad)
        placed = {id(p): p for name, p in self.model.named_parameters() if name not in self.specs}
        for name, held in list(self.model.named_parameters(remove_duplicate=False)):
            if id(held) not in placed:
                elsewhere = nn.Parameter(held.detach().to("meta"), held.requires_grad)
                placed[id(held)] = own.get(name, elsewhere)
            set_parameter(self.model, name, placed[id(held)])
        here_changed = {name for program in self.programs.values() for name in program.program.mutations}
        gone = {id(self.model.get_buffer(n)) for n in self.changed_buffers if n not in here_changed}
        for name, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            if id(buffer) in gone:
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[leaf] = buffer.to("meta")
        mixed_into(self.model, PartsModule, "Parts")


def _check_parts(model: nn.Module, parts: Mapping[str, Part]) -> None:
    if not isinstance(parts, Mapping):
        allowed = "a mapping of names to Parts, in the order of the forward"
        raise PlanError("parts", type(parts).__name__, allowed, 'parts={"front": Part(...), ...}')
    if not parts:
        raise PlanError("parts", dict(parts), "one or more parts")
    for name, part in parts.items():
        if not isinstance(part, Part):
            raise PlanError(f"parts[{name!r}]", type(part).__name__, "a Part", "Part(modules, plan)")
        check_arguments(model, part.plan)
