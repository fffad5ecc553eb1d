"""`parallelize`: a model whose forward and backward are one rank's program of the whole model.

The model object is kept: its parameters become DTensors that hold this rank's pieces, its forward runs
the compiled program, everything else (config, state_dict keys, class) stays. Any training loop and any
torch optimizer work on it. Every rank passes the same global batch; the program takes its piece.

One program is built per kind of call (training or not, shapes of the batch); parameters keep the layouts
of the first. Results that are whole on every rank come back as plain tensors, others as DTensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyperparallel.errors import RunError, UserError
from hyperparallel.graph.pipeline import Built, build
from hyperparallel.layout import Layout
from hyperparallel.plan.decide import pinned
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.batches import call_of, local_inputs, signature
from hyperparallel.runtime.compiled import Compiled
from hyperparallel.runtime.present import device_mesh, dtensor_placements, local_piece, present
from hyperparallel.runtime.ranks import Here


def parallelize(
    model: nn.Module,
    plan: Plan,
    example_batch: Any,
    *,
    compile: bool = False,
    here: Here | None = None,
) -> nn.Module:
    """Make `model` run as one rank of `plan`; every rank of the job calls this with an equal model.

    example_batch: the global batch of one step, a mapping of keyword arguments, a tuple of positional
    ones, or one tensor. compile: send compute through Inductor. Returns the same module object. Raises
    `PlanError` for a plan that does not fit the model or the job, `CaptureError` for a model that cannot be
    captured.
    """
    args, kwargs = call_of(example_batch)
    here = here or Here.in_job(plan.mesh)
    state = ParallelState(meta_twin(model), here, compile)
    place(model, state, state.build(plan, args, kwargs, train=True).built)
    return model


def place(model: nn.Module, state: ParallelState, built: Built) -> None:
    """Give the model this rank's pieces and the forward that runs its program."""
    state.settle(built)
    state.place(model, built)
    model.__class__ = type(
        f"Parallel{type(model).__name__}", (ParallelModule, type(model)), {"_original": type(model)}
    )
    object.__setattr__(model, "_parallel", state)


class ParallelModule(nn.Module):
    """Mixed into the class of a parallelized model; see `parallelize`."""

    _parallel: ParallelState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this rank's program on the global batch."""
        return self._parallel.call(self, args, kwargs)


def meta_twin(model: nn.Module) -> nn.Module:
    """The model without memory, for capturing it again when the batch has another shape."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, memo)


@dataclass
class _Program:
    built: Built
    compiled: Compiled


@dataclass
class ParallelState:
    """What a parallelized model knows beside its parameters."""

    twin: nn.Module
    here: Here
    compile: bool = False
    plan: Plan | None = None
    mesh: DeviceMesh | None = None
    programs: dict[Any, _Program] = field(default_factory=dict)

    def build(
        self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool
    ) -> _Program:
        built = build(self.twin, plan, args, kwargs, train=train)
        rank_program = built.rank_program(self.here.rank, joint=False)
        bind = self.here.binder(built.decisions.mesh, rank_program)
        compiled = Compiled(rank_program, bind, self.compile)
        program = _Program(built, compiled)
        leaves = built.captured.flatten_inputs(args, kwargs)
        self.programs[signature(leaves, train)] = program
        return program

    def settle(self, built: Built) -> None:
        """Fix the layouts of parameters for all programs to come."""
        self.mesh = device_mesh(built.decisions.mesh, self.here.device)
        self.plan = pinned(built.decisions)

    def place(self, model: nn.Module, built: Built) -> None:
        """Replace the model's parameters by DTensors of this rank's pieces."""
        assert self.mesh is not None
        names: dict[int, str] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            stored = names.setdefault(id(parameter), name)
            if stored != name:
                _set(model, name, _get(model, stored))
                continue
            spec = built.decisions.stored.get(name)
            if spec is None:
                continue
            piece = local_piece(parameter.detach(), spec, self.here.rank)
            local = torch.empty(piece.shape, dtype=piece.dtype, device=self.here.device)
            if not piece.is_meta:
                local.copy_(piece)
            placed = nn.Parameter(present(local, spec, self.mesh), parameter.requires_grad)
            names[id(placed)] = name
            _set(model, name, placed)

    def call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        program = self._program_for(model, args, kwargs)
        leaves = program.built.captured.flatten_inputs(args, kwargs)
        local = local_inputs(program.compiled.program, leaves, self.here)
        params = [model.get_parameter(name) for name in program.compiled.program.params]
        buffers = {n: model.get_buffer(n) for n in program.compiled.program.buffers}
        run = _Run(program, local, buffers, self.mesh, [p.requires_grad for p in params])
        results = _Step.apply(run, *params, *leaves)  # type: ignore[no-untyped-call]
        names = [*program.compiled.program.outputs, *program.compiled.program.mutations]
        outputs = dict(zip(names, results, strict=True))
        for name in program.compiled.program.mutations:
            model.get_buffer(name).copy_(outputs.pop(name))
        return program.built.captured.rebuild_outputs(list(outputs.values()))

    def _program_for(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Program:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        key = signature(tensors, model.training)
        if key not in self.programs:
            assert self.plan is not None
            self.build(self.plan, args, kwargs, train=model.training)
        return self.programs[key]


@dataclass
class _Run:
    """One forward on its way to its backward."""

    program: _Program
    inputs: dict[str, Tensor]
    buffers: dict[str, Tensor]
    mesh: DeviceMesh | None
    trained: list[bool]
    versions: list[int] = field(default_factory=list)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Any) -> tuple[Any, ...]:
        compiled = run.program.compiled
        program, stages = compiled.program, compiled.stages
        specs = [p._spec for p in tensors[: len(program.params)]]
        params = [p._local_tensor for p in tensors[: len(program.params)]]
        values = {**run.inputs, **dict(zip(program.params.values(), params, strict=True))}
        values |= {program.buffers[name]: x for name, x in run.buffers.items()}
        values |= compiled.constants(run.buffers)
        results = compiled.run("forward", values)
        saved = dict(zip(compiled.saved_names(), results[compiled.num_results :], strict=True))
        wanted = {n.name for n in stages.backward.inputs}
        ctx.values = {**{k: v for k, v in values.items() if k in wanted}, **saved}
        ctx.run, ctx.params, ctx.specs = run, params, specs
        ctx.versions = [p._version for p in params]
        return tuple(_result(run, name, x) for name, x in _named_results(run, results))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        run, values = ctx.run, ctx.values
        compiled = run.program.compiled
        program = compiled.program
        if values is None:
            raise RunError("backward through a parallelized model twice: its saved values were freed")
        if ctx.versions != [p._version for p in ctx.params]:
            raise RunError("a parameter was changed in place between forward and backward")
        for (path, spec), grad in zip(program.output_specs.items(), grads, strict=False):
            if path in program.tangents:
                values[program.tangents[path]] = _tangent(grad, spec, run)
        results = compiled.run("backward", values)
        ctx.values = None
        by_name = dict(zip(program.grads, results, strict=False))
        param_grads = []
        for name, spec in zip(program.params, ctx.specs, strict=True):
            grad = by_name.get(name)
            # The constructor that from_local ends in, with the parameter's own spec (torch 2.13).
            param_grads.append(
                None if grad is None else DTensor(grad, spec, requires_grad=False)
            )
        by_input = dict(zip(program.input_grads, results[len(program.grads) :], strict=True))
        return None, *param_grads, *(by_input.get(path) for path in program.inputs)


def _named_results(run: _Run, results: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    program = run.program.compiled.program
    return list(zip([*program.outputs, *program.mutations], results, strict=False))


def _result(run: _Run, name: str, local: Tensor) -> Tensor:
    spec = run.program.compiled.program.output_specs.get(name)
    if spec is None or spec.is_whole():
        return local
    assert run.mesh is not None
    return present(local, spec, run.mesh)


def _tangent(grad: Any, spec: Any, run: _Run) -> Tensor:
    """An output's incoming gradient as the local piece that the backward expects."""
    if isinstance(grad, DTensor):
        layout: Layout = spec.layout()
        local: Tensor = grad.redistribute(placements=dtensor_placements(layout)).to_local()
        return local
    return local_piece(grad, spec, spec.mesh.ranks[0]) if spec.is_whole() else _refuse(grad)


def _refuse(grad: Any) -> Tensor:
    raise UserError("gradient of an output", type(grad).__name__, "a DTensor like the output")


def _get(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
