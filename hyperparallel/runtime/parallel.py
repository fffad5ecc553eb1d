"""`parallelize`: a model whose forward and backward are one rank's program of the whole model.

The model object is kept: its parameters become DTensors that hold this rank's pieces, its forward runs
the compiled program, everything else (config, state_dict keys, class) stays. Any training loop and any
torch optimizer work on it. Every rank passes the same global batch; the program takes its piece.

One program is built per kind of call (shapes and plain values of the batch, modes of the modules, what is
frozen, gradients or not); parameters keep the layouts of the first. Results that gradients come from are
plain tensors, whole on every rank; others are plain where they are whole, else DTensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hyperparallel.errors import PlanError, RunError, UserError
from hyperparallel.graph.batch import call_tree, flatten
from hyperparallel.graph.pipeline import Built, build
from hyperparallel.plan.decide import pinned
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.batches import call_of, call_signature, local_inputs
from hyperparallel.runtime.compiled import Compiled
from hyperparallel.runtime.present import device_mesh, local_piece, present
from hyperparallel.runtime.ranks import Here
from hyperparallel.shard.spec import make_spec


def parallelize(
    model: nn.Module,
    plan: Plan,
    example_batch: Any,
    *,
    compile: bool = False,
    grad_outputs: Sequence[str] | None = None,
    here: Here | None = None,
) -> nn.Module:
    """Make `model` run as one rank of `plan`; every rank of the job calls this with an equal model.

    example_batch: the global batch of one step, a mapping of keyword arguments, a tuple of positional
    ones, or one tensor. compile: send compute through Inductor. grad_outputs: paths of the results that
    gradients come from; left out, the one called loss, or else all. Returns the same module object. Raises
    `PlanError` for a plan that does not fit the model or the job, `CaptureError` for a model that cannot be
    captured.
    """
    check_arguments(model, plan)
    args, kwargs = call_of(example_batch)
    state = ParallelState(here or Here.in_job(plan.mesh), compile, grad_outputs)
    built = state.make(model, plan, args, kwargs)
    place(model, state, built)
    if model.training:  # else a call as it is would not be what was captured
        state.add(state.key(model, args, kwargs), built)
    return model


def check_arguments(model: Any, plan: Any) -> None:
    """Refuse what is no module, no plan, or a model that is one rank's already."""
    if not isinstance(model, nn.Module):
        raise UserError("model", type(model).__name__, "a torch.nn.Module")
    if not isinstance(plan, Plan):
        raise PlanError("plan", type(plan).__name__, "a Plan", "Plan(mesh, ...)")
    if isinstance(model, ParallelModule):
        raise UserError("model", type(model).__name__, "a model that is not parallelized yet")


def place(model: nn.Module, state: ParallelState, built: Built) -> None:
    """Give the model this rank's pieces and the forward that runs its program."""
    state.settle(built)
    state.place(model, built)
    model.__class__ = type(
        f"Parallel{type(model).__name__}", (ParallelModule, type(model)), {"_original": type(model)}
    )
    object.__setattr__(model, "_parallel", state)
    object.__setattr__(model, "_parts", tuple(model.modules()))  # walking them takes longer than a look


class ParallelModule(nn.Module):
    """Mixed into the class of a parallelized model; see `parallelize`."""

    _parallel: ParallelState
    _parts: tuple[nn.Module, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this rank's program on the global batch."""
        return self._parallel.call(self, args, kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As of any module; whole plain tensors are cut to this rank's pieces."""
        held = dict(self.named_parameters(remove_duplicate=False))
        cut = {key: _cut_like(held.get(key), value) for key, value in state_dict.items()}
        return super().load_state_dict(cut, *args, **kwargs)


def _cut_like(parameter: Tensor | None, value: Any) -> Any:
    same = isinstance(parameter, DTensor) and parameter.shape == getattr(value, "shape", None)
    if not same or isinstance(value, DTensor):
        return value
    mesh, places = parameter.device_mesh, parameter.placements  # type: ignore[union-attr]
    whole = value.detach().to(mesh.device_type)
    return distribute_tensor(whole, mesh, places, src_data_rank=None)


def plain_twin(model: nn.Module) -> nn.Module:
    """A parallelized model as it was written, with parameters that have no memory, to capture again."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
        memo[id(p)] = nn.Parameter(empty, p.requires_grad)
        if p.grad is not None:
            memo[id(p.grad)] = None
    twin = copy.deepcopy(model, memo)
    del twin.__dict__["_parallel"], twin.__dict__["_parts"]
    twin.__class__ = type(model).__dict__["_original"]
    return twin


@dataclass
class _Program:
    built: Built
    compiled: Compiled


@dataclass
class ParallelState:
    """What a parallelized model knows beside its parameters."""

    here: Here
    compile: bool = False
    grad_outputs: Sequence[str] | None = None
    plan: Plan | None = None
    mesh: DeviceMesh | None = None
    programs: dict[Any, _Program] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        """A copy of the model runs the same programs; groups can't be copied."""
        return self

    def make(
        self, model: nn.Module, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], **more: Any
    ) -> Built:
        """Capture a plain model and decide."""
        return build(model, plan, args, kwargs, grad_outputs=self.grad_outputs, whole_outputs=True, **more)

    def add(self, key: Any, built: Built) -> None:
        """Compile this rank's program for one kind of call."""
        rank_program = built.rank_program(self.here.rank, joint=False)
        bind = self.here.binder(built.decisions.mesh, rank_program)
        self.programs[key] = _Program(built, Compiled(rank_program, bind, self.compile))

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
            if spec is None:  # the program does not use it; another one may
                spec = make_spec(built.decisions.mesh, [[(n, ())] for n in parameter.shape])
            piece = local_piece(parameter.detach(), spec, self.here.rank)
            local = torch.empty(piece.shape, dtype=piece.dtype, device=self.here.device)
            if not piece.is_meta:
                local.copy_(piece)
            placed = nn.Parameter(present(local, spec, self.mesh), parameter.requires_grad)
            names[id(placed)] = name
            _set(model, name, placed)

    def key(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a program depends on: the call, the modes of all modules, what is trained."""
        parts = model.__dict__["_parts"]
        modes = [part.training for part in parts]
        held = [p for part in parts for p in part._parameters.values() if p is not None]
        params = [(p.requires_grad, p.dtype) for p in held]
        return call_signature(args, kwargs), torch.is_grad_enabled(), tuple(modes), tuple(params)

    def call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        program = self._program_for(model, args, kwargs)
        leaves = program.built.captured.flatten_inputs(args, kwargs)
        local = local_inputs(program.compiled.program, leaves, self.here)
        params = [_placed(model, name) for name in program.compiled.program.params]
        buffers = {n: model.get_buffer(n) for n in program.compiled.program.buffers}
        run = _Run(program, local, buffers, self.mesh, self.here.rank)
        results = _Step.apply(run, *params, *leaves)  # type: ignore[no-untyped-call]
        names = [*program.compiled.program.outputs, *program.compiled.program.mutations]
        outputs = dict(zip(names, results, strict=True))
        with torch.no_grad():
            for name in program.compiled.program.mutations:
                model.get_buffer(name).copy_(outputs.pop(name))
        return program.built.captured.rebuild_outputs(list(outputs.values()))

    def _program_for(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Program:
        key = self.key(model, args, kwargs)
        if key not in self.programs:
            assert self.plan is not None
            leaves = flatten((tuple(args), dict(kwargs)))[1]
            train = torch.is_grad_enabled() and any(x.requires_grad for x in (*model.parameters(), *leaves))
            twin = plain_twin(model)
            plan = _without_absent(self.plan, call_tree(twin, args, kwargs)[0].paths())
            self.add(key, self.make(twin, plan, args, kwargs, train=train, as_is=True))
        return self.programs[key]


def _without_absent(plan: Plan, inputs: Sequence[str]) -> Plan:
    """The plan for a call that need not have all inputs of the first one."""
    there = {p: x for p, x in plan.inputs.items() if any(fnmatchcase(name, p) for name in inputs)}
    return replace(plan, inputs=there)


def _placed(model: nn.Module, name: str) -> DTensor:
    parameter = model.get_parameter(name)
    if not isinstance(parameter, DTensor):
        raise UserError(f"parameter {name}", "a plain tensor", "the DTensor that parallelize put there")
    return parameter


@dataclass
class _Run:
    """One forward on its way to its backward."""

    program: _Program
    inputs: dict[str, Tensor]
    buffers: dict[str, Tensor]
    mesh: DeviceMesh | None
    rank: int


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
        ctx.run, ctx.specs = run, specs
        # A DTensor counts changes by torch ops, its local tensor those made on that (TrainStep).
        kept = [name in wanted for name in program.params.values()]
        ctx.kept = [x for pair in zip(tensors, params, kept, strict=False) if pair[2] for x in pair[:2]]
        ctx.versions = [x._version for x in ctx.kept]
        ctx.set_materialize_grads(False)
        named = _named_results(run, results)
        ctx.kinds = [(x.dtype, x.device) for _, x in named]
        presented = tuple(_result(run, name, x) for name, x in named)
        updates = presented[len(program.outputs) :]
        fixed = (x for x in presented if not (x.is_floating_point() or x.is_complex()))
        ctx.mark_non_differentiable(*updates, *fixed)
        return presented

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        run, values = ctx.run, ctx.values
        compiled = run.program.compiled
        program = compiled.program
        if values is None:
            raise RunError("backward through a parallelized model twice: its saved values were freed")
        if ctx.versions != [x._version for x in ctx.kept]:
            raise RunError("a parameter was changed in place between forward and backward")
        for path, grad, (dtype, device) in zip(program.outputs, grads, ctx.kinds, strict=False):
            if path in program.tangents:
                values[program.tangents[path]] = _tangent(grad, path, run, dtype, device)
            elif grad is not None:
                known = ", ".join(program.tangents)
                raise UserError(
                    "gradient", f"one of the result {path!r}", f"gradients of {known}",
                    f"parallelize(..., grad_outputs={[*program.tangents, path]})",
                )  # fmt: skip
        results = compiled.run("backward", values)
        ctx.values = None
        by_name = dict(zip(program.grads, results, strict=False))
        param_grads = []
        for name, spec in zip(program.params, ctx.specs, strict=True):
            grad = by_name.get(name)
            # The constructor that from_local ends in, with the parameter's own spec (torch 2.13).
            param_grads.append(None if grad is None else DTensor(grad, spec, requires_grad=False))
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


def _tangent(grad: Any, path: str, run: _Run, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An output's incoming gradient as the local piece that the backward expects."""
    built = run.program.built
    spec = built.decisions.sources[built.workload.tangents[path]]
    if grad is None:
        grad = torch.zeros((), dtype=dtype, device=device).expand(spec.shape)
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    return local_piece(grad, spec, run.rank)


def _get(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
