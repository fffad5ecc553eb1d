"""`PartsStep`: one training step of a model whose parts run on meshes of their own, in one job.

The model is captured once and cut by modules (`graph/passes/split.py`). Each part has its plan, its
programs and its share of the optimizer's state; activations go from mesh to mesh with the forward, their
gradients back with the backward, each laid out anew on the way (`edges.py`). A rank runs the parts whose
mesh it is in, none or several, and holds no memory for the parameters of others.

One batch at a time goes through all parts. Leaves out schedules that keep all meshes busy, accumulation
and clipping, and dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyperparallel.errors import PlanError, Words
from hyperparallel.graph.build import Built
from hyperparallel.graph.capture.batch_tree import call_of
from hyperparallel.graph.capture.precision import without_autocast
from hyperparallel.graph.decided import Decision, decisions
from hyperparallel.graph.edge import Edge
from hyperparallel.graph.parts import BuiltParts, Part, build_parts
from hyperparallel.layout import Mesh
from hyperparallel.runtime.exec.compiled import Compiled, NamedTensors
from hyperparallel.runtime.job.agreement import agree
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.as_dtensor import Presenter, local_piece
from hyperparallel.runtime.module.edges import EdgeProgram
from hyperparallel.runtime.module.fast_path.held_tensors import set_parameter
from hyperparallel.runtime.module.local_batch import signature
from hyperparallel.runtime.module.step import MakeOptimizer, StepResult, local_of


class PartProgram:
    """Forward and backward of one part on one rank of its mesh."""

    def __init__(self, built: Built, here: Here, compile: bool = False) -> None:
        self.here = here
        self.program = built.rank_program(here.rank, joint=False)
        agree(here, decisions(built, self.program, {"compile": compile}), "the program of a part")
        bind = here.binder(built.decisions.mesh, self.program)
        self.compiled = Compiled(self.program, bind, compile)
        self._read_later = [node.name for node in self.compiled.stages.backward.inputs]
        self._saved: dict[str, Tensor] = {}

    def forward(
        self, params: NamedTensors, buffers: NamedTensors, batch: NamedTensors, received: NamedTensors
    ) -> dict[str, Tensor]:
        """This rank's pieces of the part's results; buffers are updated in place.

        params, buffers, received: local pieces by name. batch: whole tensors by path.
        """
        program, compiled = self.program, self.compiled
        values = {name: params[path] for path, name in program.params.items()}
        values |= {name: buffers[path] for path, name in program.buffers.items()}
        for path, name in program.inputs.items():
            if path in received:
                values[name] = received[path]
            else:
                piece = local_piece(batch[path].detach(), program.input_specs[path], self.here.rank)
                values[name] = piece.to(self.here.device)
        values |= compiled.constants({path: buffers[path] for path in program.buffers})
        results = compiled.run("forward", values)
        values |= zip(compiled.saved_names(), results[compiled.num_results :], strict=True)
        self._saved = {name: values[name] for name in self._read_later if name in values}
        for path, new in zip(program.mutations, results[len(program.outputs) :], strict=False):
            buffers[path].copy_(new)
        return dict(zip(program.outputs, results, strict=False))

    def backward(self, tangents: NamedTensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of the part's parameters and of what it received, from those of its results."""
        program, values = self.program, self._saved
        values |= {name: tangents[path] for path, name in program.tangents.items()}
        self._saved = {}
        results = self.compiled.run("backward", values)
        count = len(program.grads)
        grads = dict(zip(program.grads, results, strict=False))
        return grads, dict(zip(program.input_grads, results[count:], strict=True))


class PartsStep:
    """A training step of `model` in parts; every rank of some part makes one and calls it alike.

    optimizer: as for `TrainStep`; called on each rank with the parameters of its own parts. parts: by name,
        in the order in which the forward goes through them. example_batch, loss, compile: as for
        `TrainStep`; every rank passes the same global batch.
    The model's parameters become DTensors on the mesh of their part, and have no memory ("meta") on
    ranks of other parts. Raises `PlanError` for parts that cannot be cut so, or on a rank of no part.

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
        loss: str = "",
        compile: bool = False,
    ) -> None:
        if not isinstance(parts, Mapping) or not all(isinstance(part, Part) for part in parts.values()):
            raise PlanError("parts", parts, "a mapping from names to parts", '{"front": Part([...], plan)}')
        if not parts:
            raise PlanError("parts", parts, "one or more parts")
        args, kwargs = call_of(example_batch)
        self.names, self.model = tuple(parts), model
        self.compute = next(iter(parts.values())).plan.compute
        ranks = sorted({rank for part in parts.values() for rank in part.plan.mesh.ranks})
        self.here = Here.in_job(Mesh((len(ranks),), ("parts",), ranks))
        self.built = build_parts(
            model, list(parts.values()), args, kwargs, loss=loss, device=self.here.device
        )
        agree(self.here, list(_agreed(self.built)), "the parts of a model")
        self._batch_kind = signature(self.built.captured.flatten_inputs(args, kwargs))
        self.programs = {
            i: PartProgram(built, self._in(built), compile)
            for i, built in enumerate(self.built.built)
            if self.here.rank in built.decisions.mesh.ranks
        }
        self._edges = {edge: self._edge(edge) for edge in (*self.built.edges, *self.built.reports)}
        self._place()
        trained = [n for program in self.programs.values() for n in program.program.grads]
        self.params = {
            name: nn.Parameter(local_of(model.get_parameter(name)))
            for program in self.programs.values()
            for name in program.program.params
        }
        self.optimizer = optimizer([(name, self.params[name]) for name in trained]) if trained else None

    def __call__(self, batch: Any) -> StepResult:
        return self.step(batch)

    def step(self, batch: Any) -> StepResult:
        """One update from a global batch; every rank gets its loss before the update."""
        waited = self._waited()
        with without_autocast(self.compute, self.here.device.type):
            loss = self._forward(batch)
            self._backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return StepResult(float(loss), math.nan, self._waited() - waited)

    def _waited(self) -> float:
        clocks = [program.compiled.clock for program in self.programs.values()]
        clocks += [edge.clock for edge in self._edges.values() if edge is not None]
        return sum(clock.seconds for clock in clocks)

    def _forward(self, batch: Any) -> Tensor:
        """Go through the parts in order; returns the loss."""
        args, kwargs = call_of(batch)
        leaves = self.built.captured.flatten_inputs(args, kwargs)
        if signature(leaves) != self._batch_kind:
            shapes = ", ".join(str(list(x.shape)) for x in leaves)
            allowed = "the shapes and dtypes of example_batch"
            raise PlanError("batch", Words(f"shapes {shapes}"), allowed, "a PartsStep for each kind of batch")
        whole = dict(zip(self.built.captured.inputs, leaves, strict=True))
        made: list[dict[str, Tensor]] = [{} for _ in self.names]
        for part in range(len(self.names)):
            received = self._crossed(self.built.into(part, backward=False), made)
            if part in self.programs:
                made[part] = self.programs[part].forward(
                    self.params, self._buffers(part), whole, received
                )
        told = self._crossed(self.built.reports, made)
        return made[self.built.loss_part].get(self.built.loss, told.get(self.built.loss))  # type: ignore[return-value]

    def _backward(self) -> None:
        """Go through the parts in reverse order; sets `.grad` of this rank's parameters."""
        made: list[dict[str, Tensor]] = [{} for _ in self.names]
        for part in reversed(range(len(self.names))):
            tangents = self._crossed(self.built.into(part, backward=True), made)
            if part not in self.programs:
                continue
            if part == self.built.loss_part:
                kind = getattr(torch, self.built.built[part].workload.values[self._loss_value].dtype)
                tangents[self.built.loss] = torch.ones((), dtype=kind, device=self.here.device)
            grads, made[part] = self.programs[part].backward(tangents)
            for name, grad in grads.items():
                self.params[name].grad = grad

    @property
    def _loss_value(self) -> str:
        return self.built.built[self.built.loss_part].workload.outputs[self.built.loss]

    def _crossed(self, edges: Sequence[Edge], made: Sequence[NamedTensors]) -> dict[str, Tensor]:
        """What this rank gets through edges, in their order, from what the parts have made."""
        found = {}
        for edge in edges:
            program = self._edges[edge]
            if program is not None:
                piece = program(made[edge.source][edge.name] if program.sends else None)
                if piece is not None:
                    found[edge.name] = piece
        return found

    def _buffers(self, part: int) -> dict[str, Tensor]:
        return {name: self.model.get_buffer(name) for name in self.programs[part].program.buffers}

    def _in(self, built: Built) -> Here:
        """This rank's place in the mesh of a part."""
        return Here.in_job(built.decisions.mesh, self.here.groups)

    def _edge(self, edge: Edge) -> EdgeProgram | None:
        if self.here.rank not in edge.ranks:
            return None
        return EdgeProgram(edge, self.here.rank, self.here.device, self.here.groups)

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
        used = {name for built in self.built.built for name in built.decisions.stored}
        placed = {id(p): p for name, p in self.model.named_parameters() if name not in used}
        for name, held in list(self.model.named_parameters(remove_duplicate=False)):
            if id(held) not in placed:
                elsewhere = nn.Parameter(held.detach().to("meta"), held.requires_grad)
                placed[id(held)] = own.get(name, elsewhere)
            set_parameter(self.model, name, placed[id(held)])


def _agreed(built: BuiltParts) -> Iterator[Decision]:
    """What ranks of all parts decided alike: they plan each other's parts to know what crosses."""
    for number, each in enumerate(built.built):
        for about, value in decisions(each, None, {}):
            yield f"part {number}, {about}", value
    for edge in (*built.edges, *built.reports):
        yield edge.name, str(edge)
