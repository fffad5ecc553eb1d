"""`parallelize`: a model whose forward and backward are one rank's program of the whole model.

The model object is kept: its parameters become DTensors that hold this rank's pieces, its forward runs
the compiled program, everything else (config, state_dict keys, class) stays. Any training loop and any
torch optimizer work on it. Every rank passes the same global batch; the program takes its piece.

One program is built per kind of call (shapes and plain values of the batch, modes of the modules, what is
frozen, gradients or not); parameters keep the layouts of the first. Results that gradients come from are
plain tensors, replicated; others are plain where they are whole, else DTensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hyperparallel.errors import PlanError, UserError
from hyperparallel.graph.build import Built, build
from hyperparallel.graph.capture.batch_tree import CallTree, call_of, call_tree
from hyperparallel.graph.capture.precision import without_autocast
from hyperparallel.graph.decided import decisions
from hyperparallel.graph.program import RankProgram
from hyperparallel.layout import Mesh
from hyperparallel.plan.decide import pinned
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.exec.compiled import Compiled
from hyperparallel.runtime.job.agreement import FOR_A_CALL, agree
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.as_dtensor import Presenter, local_piece
from hyperparallel.runtime.module.choose_mesh import automatic_plan
from hyperparallel.runtime.module.differentiable import Differentiable
from hyperparallel.runtime.module.fast_path.call_kinds import order_of_leaves, take_apart
from hyperparallel.runtime.module.fast_path.held_tensors import Holdings, set_parameter
from hyperparallel.runtime.module.local_batch import signature
from hyperparallel.shard.spec import make_spec


def parallelize(
    model: nn.Module,
    plan: Plan | Literal["auto"],
    example_batch: Any,
    *,
    compile: bool = False,
    grad_outputs: Sequence[str] | None = None,
    here: Here | None = None,
) -> nn.Module:
    """Make `model` run as one rank of `plan`; every rank of its mesh calls this with an equal model.

    plan: "auto" takes the cheapest mesh of the job's ranks that fits their memory (`choose_mesh.py`).
    example_batch: the global batch of one step, a mapping of keyword arguments, a tuple of positional
    ones, or one tensor. compile: send compute through Inductor. grad_outputs: paths of the results that
    gradients come from; left out, the one called loss, or else all. Returns the same module object. Raises
    `PlanError` for a plan that does not fit the model or the job, or whose mesh this rank is not in,
    `CaptureError` for a model that cannot be captured, `RunError` where ranks decided differently.

    >>> import torch, hyperparallel as hp
    >>> model = hp.parallelize(torch.nn.Linear(4, 2), hp.Plan(hp.Layout((1,), ("dp",))), torch.ones(3, 4))
    >>> model(torch.ones(3, 4)).sum().backward()  # in a job: every rank, with a mesh of its ranks
    >>> tuple(model.weight.grad.shape)
    (2, 4)
    """
    args, kwargs = call_of(example_batch)
    if plan == "auto":
        check_arguments(model, Plan(Mesh((1,), ("dp",))))
        plan = automatic_plan(model, args, kwargs, grad_outputs=grad_outputs, whole_outputs=True)
    check_arguments(model, plan)
    assert isinstance(plan, Plan)
    # A TrainStep knows which backward is a step's last; a module is told of none.
    if plan.zero == 1:
        allowed = "2 or 3: every backward of a module cuts its gradients, so none are kept whole"
        raise PlanError("zero", plan.zero, allowed, "zero=2, or hp.TrainStep with accumulate=k,")
    state = ParallelState(here or Here.in_job(plan.mesh), compile, grad_outputs)
    built, program = state.make(model, plan, args, kwargs)
    make_parallel(model, state, built)
    if model.training:  # else a call as it is would not be what was captured
        leaves = built.captured.flatten_inputs(args, kwargs)
        state.add(state.kind(model, built.captured.in_spec, leaves), built, program)
    return model


def check_arguments(model: Any, plan: Any) -> None:
    """Refuse what is no module, no plan, or a model that is one rank's already."""
    if not isinstance(model, nn.Module):
        raise UserError("model", type(model).__name__, "a torch.nn.Module")
    if not isinstance(plan, Plan):
        given = plan if isinstance(plan, str) else type(plan).__name__
        raise PlanError("plan", given, 'a Plan or "auto"', "Plan(mesh, ...)")
    if isinstance(model, PlacedModule):
        raise UserError("model", type(model).__name__, "a model that is not parallelized yet")


def make_parallel(model: nn.Module, state: ParallelState, built: Built) -> None:
    """Give the model this rank's pieces and the forward that runs its program."""
    state.settle(built)
    state.place(model, built)
    mixed_into(model, ParallelModule, "Parallel")
    object.__setattr__(model, "_parallel", state)
    object.__setattr__(model, "_holdings", Holdings())


class PlacedModule(nn.Module):
    """Mixed into the class of a model whose parameters are this rank's pieces, or without memory on a rank
    that holds none of them; the class as it was written is its `_original`."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As of any module; whole plain tensors are cut to this rank's pieces."""
        held = dict(self.named_parameters(remove_duplicate=False))
        cut = {key: _cut_like(held.get(key), value) for key, value in state_dict.items()}
        return super().load_state_dict(cut, *args, **kwargs)


class ParallelModule(PlacedModule):
    """Mixed into the class of a parallelized model; see `parallelize`."""

    _parallel: ParallelState
    _holdings: Holdings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this rank's program on the global batch."""
        state = self._parallel
        assert state.plan is not None
        with without_autocast(state.plan.compute, state.here.device.type):
            return state.call(self, args, kwargs)


def mixed_into(model: nn.Module, mixin: type[PlacedModule], name: str) -> None:
    """Make a model one of `mixin`, under a name that tells."""
    kind = type(model)
    model.__class__ = type(f"{name}{kind.__name__}", (mixin, kind), {"_original": kind})


def _cut_like(parameter: Tensor | None, value: Any) -> Any:
    if isinstance(parameter, Tensor) and parameter.is_meta and isinstance(value, Tensor):
        return value.detach().to("meta")  # torch warns of values that go nowhere
    same = isinstance(parameter, DTensor) and parameter.shape == getattr(value, "shape", None)
    if not same or isinstance(value, DTensor):
        return value
    mesh, places = parameter.device_mesh, parameter.placements  # type: ignore[union-attr]
    whole = value.detach().to(mesh.device_type)
    # None: every rank has the whole value, so nothing is sent.
    return distribute_tensor(whole, mesh, places, src_data_rank=None)


def plain_twin(model: nn.Module) -> nn.Module:
    """A model as it was before it was placed, with parameters that have no memory, to capture again."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
        memo[id(p)] = nn.Parameter(empty, p.requires_grad)
        if p.grad is not None:
            # Not captured, and it may be as large as the model: the memo makes a copy of it None.
            memo[id(p.grad)] = None
    # The memo stands in for parameters: what is captured is plain tensors, and no memory is copied.
    twin = copy.deepcopy(model, memo)
    for added in ("_parallel", "_holdings"):
        twin.__dict__.pop(added, None)
    twin.__class__ = type(model).__dict__["_original"]
    return twin


@dataclass(frozen=True)
class _Known:
    """What a kind of call runs. order: of its tensors, or None where they must be found in a tree."""

    program: Differentiable
    order: list[int] | None


@dataclass
class ParallelState:
    """What a parallelized model knows beside its parameters."""

    here: Here
    compile: bool = False
    grad_outputs: Sequence[str] | None = None
    plan: Plan | None = None
    presenter: Presenter | None = None
    programs: dict[Any, Differentiable] = field(default_factory=dict)
    _known: dict[Any, _Known] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        """A copy of the model runs the same programs; groups can't be copied."""
        return self

    def make(
        self, model: nn.Module, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], **more: Any
    ) -> tuple[Built, RankProgram]:
        """Capture a plain model, decide, and write this rank's program; the mesh's ranks agree on it."""
        roots, device = self.grad_outputs, self.here.device
        built = build(
            model, plan, args, kwargs, grad_outputs=roots, whole_outputs=True, device=device, **more
        )
        program = built.rank_program(self.here.rank, joint=False)
        decided = decisions(built, program, {"compile": self.compile})
        agree(self.here, decided, "the program of a call", FOR_A_CALL)
        return built, program

    def add(self, kind: Any, built: Built, program: RankProgram) -> None:
        """Compile this rank's program for one kind of call."""
        assert self.presenter is not None
        bind = self.here.binder(built.decisions.mesh, program)
        compiled = Compiled(program, bind, self.compile)
        self.programs[kind] = Differentiable(built, compiled, self.here, self.presenter)

    def settle(self, built: Built) -> None:
        """Fix the layouts of parameters for all programs to come."""
        decided = built.decisions
        self.here.connect(decided.mesh, [(axis,) for axis in decided.mesh.names])
        self.presenter = Presenter.of(
            decided.mesh, decided.stored.values(), self.here.device, self.here.groups.process_group
        )
        self.plan = pinned(decided)

    def place(self, model: nn.Module, built: Built) -> None:
        """Replace the model's parameters by DTensors of this rank's pieces."""
        assert self.presenter is not None
        names: dict[int, str] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            # By identity: tied parameters stay one object, under each of their names.
            stored = names.setdefault(id(parameter), name)
            if stored != name:
                set_parameter(model, name, model.get_parameter(stored))
                continue
            spec = built.decisions.stored.get(name)
            if spec is None:  # the program does not use it; another one may
                spec = make_spec(built.decisions.mesh, [[(n, ())] for n in parameter.shape])
            piece = local_piece(parameter.detach(), spec, self.here.rank)
            # Memory of its own: a view would keep the whole parameter alive.
            local = torch.empty(piece.shape, dtype=piece.dtype, device=self.here.device)
            if not piece.is_meta:
                local.copy_(piece)
            placed = nn.Parameter(self.presenter.present(local, spec, name), parameter.requires_grad)
            names[id(placed)] = name
            set_parameter(model, name, placed)

    def call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of `model(*args, **kwargs)`."""
        holdings: Holdings = model.__dict__["_holdings"]
        taken = take_apart(args, kwargs)
        # Looked at in every call: modes, frozen parameters and dtypes change without a word to this object.
        key = taken.key, torch.is_grad_enabled(), holdings.look(model)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._know(model, args, kwargs, taken.leaves is not None)
        program, leaves = known.program, taken.leaves
        if leaves is None or known.order is None:
            leaves = program.built.captured.flatten_inputs(args, kwargs)
        else:
            leaves = [leaves[place] for place in known.order]
        params, buffers = holdings.tensors(model, program, program.params, program.buffers)
        return program.call(params, buffers, leaves)

    def kind(self, model: nn.Module, call: CallTree, leaves: Sequence[Tensor]) -> Any:
        """What a program depends on: the call, the modes of all modules, what is trained."""
        looked = model.__dict__["_holdings"].look(model)
        return signature(leaves), call.tree.outline(), torch.is_grad_enabled(), looked

    def _know(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], is_flat: bool
    ) -> _Known:
        """Find or build the program of a call that was not seen before in this spelling."""
        twin = plain_twin(model)
        # By the twin's signature: two spellings of a call are one program, found in `programs`.
        tree, leaves = call_tree(twin, args, kwargs)
        kind = self.kind(model, tree, leaves)
        if kind not in self.programs:
            assert self.plan is not None
            train = torch.is_grad_enabled() and any(x.requires_grad for x in (*model.parameters(), *leaves))
            self.add(kind, *self.make(twin, self.plan, args, kwargs, train=train, as_is=True, later=True))
        program = self.programs[kind]
        order = order_of_leaves(program.built.captured.in_spec, args, kwargs) if is_flat else None
        return _Known(program, order)
