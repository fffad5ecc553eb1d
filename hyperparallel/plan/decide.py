"""Derive everything that a plan leaves open: how each op runs and how each tensor lies on the mesh.

Axis by axis, outermost first: settle what the plan fixes (batch axes cut the inputs, declared layouts
fix parameters), let `solve_axis` choose the rest at the least cost, and collect the choices as `Cuts`
per op and `Spec`s per source. An axis larger than the number of heads that must not be torn is first
split in two (`refine`), so that grouped key/value heads are cut by the outer part and replicated over
the inner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hyperparallel.cluster import Rates
from hyperparallel.errors import LayoutError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan.fixed_layouts import dim_place, region_of, written_choices, written_specs
from hyperparallel.plan.op_specs import factor_cuts, operand_specs
from hyperparallel.plan.plan import Plan, match
from hyperparallel.plan.split_axes import refine
from hyperparallel.plan.wording import bytes_words
from hyperparallel.shard.axis_problem import AxisDecision, AxisTask, Progress, constant_ops
from hyperparallel.shard.axis_states import WHOLE, AxisState, Cut
from hyperparallel.shard.op_seconds import StepSeconds
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import facts_of
from hyperparallel.shard.solve_axis import solve_axis
from hyperparallel.shard.spec import FactorCut, Spec, make_spec, spec_of_layout
from hyperparallel.workload import Workload

OPTIMIZER_TOUCHES = 7.0
"""Reads and writes of a parameter-sized array per update: AdamW reads four and writes three."""


@dataclass(frozen=True)
class Decisions:
    """All that the partition pass needs to know.

    stored / used: per parameter name, how it is kept between steps and how the program takes it.
    sources, outputs: spec per value name. operands: per op name the specs of its inputs and outputs.
    cuts: op name -> factor -> who cuts it. constant: ops that run once.
    reasons: per parameter name, why it is laid out as it is. rates: what all was priced with.
    """

    plan: Plan
    mesh: Mesh
    stored: Mapping[str, Spec]
    used: Mapping[str, Spec]
    sources: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    operands: Mapping[str, tuple[tuple[Spec, ...], tuple[Spec | None, ...]]]
    cuts: Mapping[str, Mapping[str, FactorCut]]
    constant: frozenset[str]
    reasons: Mapping[str, str]
    seconds: float
    bound_seconds: float
    rates: Rates

    def step_seconds(self, dtype: str) -> StepSeconds:
        """What the steps of a redistribution cost; one for all ranks, as `reshard` remembers by it."""
        known = self._step_seconds
        return known.setdefault(dtype, StepSeconds(self.rates, dtype, self.plan.reduce))

    @cached_property
    def _step_seconds(self) -> dict[str, StepSeconds]:
        return {}

    def accumulated(self, name: str) -> Spec:
        """How a gradient lies while micro-batches are added up, apart from sums that wait for the last."""
        return (self.used if self.plan.zero == 1 else self.stored)[name]


def decide(
    workload: Workload,
    rules: Mapping[str, Rule],
    plan: Plan,
    rates: Rates | None = None,
    *,
    random: frozenset[str] = frozenset(),
    whole: frozenset[str] = frozenset(),
    edges: frozenset[str] = frozenset(),
    micro_batches: int = 1,
    later: bool = False,
    solver_seconds: float = 20.0,
) -> Decisions:
    """Derive a whole program from a plan.

    rules: per op name. random: names of ops that draw random numbers (never folded into constants).
    whole: paths of results that every rank gets whole. edges: paths of the batch whose gradients another part
    of the model takes as they lie; others end whole. micro_batches: how often the program runs before
    its gradients are reduced. later: a further program of a model, which need not take every input nor run
    every module that the plan names.
    Raises `PlanError`/`LayoutError` for declarations that match nothing or do not fit.
    """
    rates = rates or Rates()
    settling = _Settling(
        workload, refine(plan, workload, rules), random, whole, edges, micro_batches, later, rates
    )
    done = Progress()
    axes = []
    for axis in settling.mesh.names:
        # An axis of one rank decides nothing; no layout names it either.
        if settling.mesh.axis_size(axis) > 1:
            task = settling.task(axis, done)
            constant = settling.constant
            axes.append(
                solve_axis(workload, rules, task, done, rates, constant=constant, seconds=solver_seconds)
            )
    return settling.decisions(axes, rules)


def _looks(work: Workload, value: str) -> set[str]:
    """A parameter and what is only another look at it: casts, and views of either."""
    found = {value, *work.casts[value]}
    todo = list(found)
    while todo:
        for op in work.consumers[todo.pop()]:
            # Of one operand: a view of several would be no look at the parameter alone.
            if len(op.inputs) == 1 and facts_of(op.target).view:
                fresh = {made for made in op.outputs if made} - found
                found |= fresh
                todo += fresh
    return found


def pinned(decisions: Decisions) -> Plan:
    """The plan that declares every parameter as it was decided to be stored, for another batch shape."""
    layouts = {name: spec.layout() for name, spec in decisions.stored.items()}
    batch = decisions.plan.batch_axes
    keeps = any(axis in batch for layout in layouts.values() for axis in layout.cut_axes)
    zero = decisions.plan.zero if keeps else 3  # a plan says it only where something is kept cut
    return replace(decisions.plan, params=layouts, fsdp=None, batch=batch, zero=zero)


@dataclass
class _Settling:
    """What the plan says, looked up for one workload."""

    workload: Workload
    plan: Plan
    random: frozenset[str]
    whole: frozenset[str]
    edges: frozenset[str]
    micro_batches: int
    later: bool
    rates: Rates
    declared: dict[str, tuple[str, Layout]] = field(init=False)
    inputs: dict[str, tuple[str, Layout]] = field(init=False)
    stored_on_batch: dict[str, tuple[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        work = self.workload
        # A tied weight may be declared by any of its names; it is stored under one.
        declared = match(self.plan.params, work.names_of_params(), "params")
        self.declared = {work.param_aliases.get(name, name): hit for name, hit in declared.items()}
        self.inputs = match(self.plan.inputs, work.inputs, "inputs", lenient=self.later)
        for table, names in ((self.declared, work.params), (self.inputs, work.inputs)):
            for name, (_, layout) in table.items():
                _check_rank(name, layout, work.values[names[name]].shape)
        self.pins = _pins(self.plan, work, self.later)
        self.constant = constant_ops(work, self.random)
        self.stored_on_batch = {name: cut for name in work.params if (cut := self._fsdp_cut(name))}

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    def _fsdp_cut(self, name: str) -> tuple[int, str] | None:
        """(dim, axis) on which the batch axis `fsdp` keeps this parameter cut, if it does."""
        axis = self.plan.fsdp
        shape = self.workload.values[self.workload.params[name]].shape
        dims = self.declared[name][1].dims if name in self.declared else ((),) * len(shape)
        if axis is None or any(axis in axes for axes in dims):
            return None
        free = [d for d, axes in enumerate(dims) if not axes]
        n = self.mesh.axis_size(axis)
        even = [d for d in free if shape[d] % n == 0]
        # Rows where they go round: whole rows are gathered and scattered without a copy.
        best = max(even or free, key=lambda d: (shape[d] >= n, -d), default=None)
        return None if best is None or shape[best] < 2 else (best, axis)

    def task(self, axis: str, done: Progress) -> AxisTask:
        work, n = self.workload, self.mesh.axis_size(axis)
        sources: dict[str, tuple[AxisState, ...]] = {}
        sinks: dict[str, tuple[AxisState, ...] | str] = {}
        declared: set[str] = set()
        for name, value in work.params.items():
            sources[value] = self._param_places(name, value, axis, done)
            # Its casts and views too: else the solver would gather there what it may not gather here.
            if name in self.declared and len(sources[value]) == 1:
                declared.update(_looks(work, value))
            if name in work.grads:
                stored = self._stored_cut(name, axis)
                # On other axes a gradient ends as its parameter is used; on a batch axis as it is stored.
                sinks[work.grads[name]] = value if stored is None else (stored,)
        for value in work.buffers.values():
            sources[value] = (WHOLE,)
        for path, value in work.inputs.items():
            sources[value] = self._input_places(path, value, axis, done)
        for path, value in work.outputs.items():
            sinks[value] = (WHOLE,) if path in self.whole else self._free(value, done, n)
        for path, value in (*work.mutations.items(), *work.input_grads.items()):
            sinks[value] = self._free(value, done, n) if path in self.edges else (WHOLE,)
        for value in work.tangents.values():
            sources[value] = self._free(value, done, n)
        trained = {work.params[name] for name in work.grads}
        update = {v: OPTIMIZER_TOUCHES * work.values[v].num_bytes for v in trained}
        pins = {
            value: dim_place(work, value, layout, axis) or WHOLE
            for value, layout in self.pins.items()
        }
        return AxisTask(
            name=axis,
            size=n,
            sources=sources,
            sinks=sinks,
            declared=frozenset(declared),
            update_bytes=update,
            pins=pins,
            keeps_cuts=axis in self.plan.batch_axes,
            fixed=written_choices(work, axis),
            reduce=self.plan.reduce,
            gradients=frozenset(work.grads.values()),
            micro_batches=self.micro_batches,
            late_cuts=axis in self.plan.batch_axes and self.plan.zero == 1,
        )

    def _param_places(self, name: str, value: str, axis: str, done: Progress) -> tuple[AxisState, ...]:
        if axis in self.plan.batch_axes:
            return (WHOLE,)
        if name in self.declared:
            return (dim_place(self.workload, value, self.declared[name][1], axis) or WHOLE,)
        return self._free(value, done, self.mesh.axis_size(axis))

    def _stored_cut(self, name: str, axis: str) -> AxisState | None:
        """The placement in which a batch axis keeps the gradient; None on other axes."""
        if axis not in self.plan.batch_axes:
            return None
        value = self.workload.params[name]
        if name in self.declared:
            place = dim_place(self.workload, value, self.declared[name][1], axis)
            if place:
                return place
        dim, by = self.stored_on_batch.get(name, (0, ""))
        if by != axis:
            return WHOLE
        return Cut(dim, self.workload.values[value].shape[dim])

    def _input_places(self, path: str, value: str, axis: str, done: Progress) -> tuple[AxisState, ...]:
        if path in self.inputs:
            return (dim_place(self.workload, value, self.inputs[path][1], axis) or WHOLE,)
        shape = self.workload.values[value].shape
        # The first input with dims says what the batch is: others of as many rows are of the batch too.
        batch = next(filter(None, (self.workload.values[v].shape for v in self.workload.inputs.values())), ())
        if axis in self.plan.batch_axes and shape and shape[:1] == batch[:1] and shape[0] > 1:
            return (Cut(0, -(-shape[0] // done.values[value])),)
        return self._free(value, done, self.mesh.axis_size(axis))

    def _free(self, value: str, done: Progress, n: int) -> tuple[AxisState, ...]:
        shape, taken = self.workload.values[value].shape, done.values[value]
        # What an earlier axis cut is not cut again: a second axis on one dim would need the order of both.
        cuts = (Cut(d, s) for d, s in enumerate(shape) if s and s % n == 0 and taken == 1)
        return (WHOLE, *cuts)

    def decisions(self, axes: list[AxisDecision], rules: Mapping[str, Rule]) -> Decisions:
        work, mesh = self.workload, self.mesh
        sources = {v: self._placed(v, [(a.name, a.sources[v]) for a in axes]) for v in work.sources()}
        used = {name: self._used(name, sources[value]) for name, value in work.params.items()}
        stored = {name: self._stored(name, spec) for name, spec in used.items()}
        for path, (_, layout) in self.inputs.items():
            value = work.inputs[path]
            sources[value] = spec_of_layout(layout, work.values[value].shape)
        outputs = {
            v: self._placed(v, [(a.name, a.sinks[v]) for a in axes])
            for group in (work.outputs, work.mutations, work.input_grads)
            for v in group.values()
        }
        cuts: dict[str, dict[str, FactorCut]] = {}
        operands = {}
        for op in work.ops:
            chosen = [(a.name, a.ops[op.name]) for a in axes]
            cuts[op.name] = factor_cuts(chosen)
            derived = operand_specs(mesh, rules[op.name], chosen, cuts[op.name])
            operands[op.name] = written_specs(op, work) or derived
        return Decisions(
            plan=self.plan,
            mesh=mesh,
            stored=stored,
            used=used,
            sources=sources,
            outputs=outputs,
            operands=operands,
            cuts=cuts,
            constant=self.constant,
            reasons={name: self._reason(name, used[name], stored[name]) for name in work.params},
            seconds=sum(a.seconds for a in axes),
            bound_seconds=sum(a.bound_seconds for a in axes),
            rates=self.rates,
        )

    def _placed(self, value: str, places: list[tuple[str, AxisState]]) -> Spec:
        shape = self.workload.values[value].shape
        cut: list[tuple[str, ...]] = [() for _ in shape]
        for axis, place in places:
            if isinstance(place, Cut):
                cut[place.dim] += (axis,)
        return make_spec(self.mesh, [[(s, a)] for s, a in zip(shape, cut, strict=True)])

    def _used(self, name: str, derived: Spec) -> Spec:
        if name not in self.declared:
            return derived
        # Batch axes cut a declared weight between uses only: at use it is whole on them.
        keep = [
            tuple(a for a in axes if a not in self.plan.batch_axes) for axes in self.declared[name][1].dims
        ]
        return make_spec(self.mesh, [[(s, a)] for s, a in zip(derived.shape, keep, strict=True)])

    def _stored(self, name: str, used: Spec) -> Spec:
        if name in self.declared and any(
            axis in self.plan.batch_axes for axes in self.declared[name][1].dims for axis in axes
        ):
            return spec_of_layout(self.declared[name][1], used.shape)
        if name not in self.stored_on_batch:
            return used
        dim, axis = self.stored_on_batch[name]
        dims = list(used.layout().dims)
        if dims[dim]:
            # The solver has cut that dim meanwhile: another one keeps both cuts plain.
            free = [d for d, axes in enumerate(dims) if not axes and used.shape[d] > 1]
            dim = free[0] if free else dim
        order = self.mesh.names.index
        if any(order(before) > order(axis) for before in dims[dim]):
            return used  # a bias, say: too small to be worth a layout that DTensor has no word for
        dims[dim] += (axis,)
        return make_spec(self.mesh, [[(s, a)] for s, a in zip(used.shape, dims, strict=True)])

    def _reason(self, name: str, used: Spec, stored: Spec) -> str:
        if name in self.declared:
            why = f"declared by {self.declared[name][0]!r}"
        elif used.axes and (region := region_of(self.workload, name, used)):
            why = f"declared by the region {region}"
        elif used.axes:
            why = f"derived: cut by {', '.join(used.axes)} costs least with what its neighbours do"
        else:
            why = "derived: replicated costs least"
        if name in self.stored_on_batch and stored != used:
            why += f"; kept cut by {self.plan.fsdp} between uses (fsdp, zero={self.plan.zero})"
            if self.plan.in_flight_bytes is not None:
                ahead = bytes_words(self.plan.in_flight_bytes)
                why += f", gathered ahead of use while at most {ahead} are under way (in_flight_bytes)"
        return why


def _check_rank(name: str, layout: Layout, shape: tuple[int, ...]) -> None:
    if len(layout.dims) != len(shape):
        raise LayoutError(
            f"layout of {name}", str(layout), f"{len(shape)} entries for the shape {list(shape)}"
        )


def _pins(plan: Plan, workload: Workload, later: bool) -> dict[str, Layout]:
    """value -> layout for the values that the declared modules return."""
    last: dict[str, str] = {}
    for op in workload.ops:
        if not op.backward and op.outputs and op.outputs[0]:
            parts = op.module.split(".")
            for i in range(1, len(parts) + 1):
                # The last op inside a module, or inside what it holds, makes what it returns.
                last[".".join(parts[:i])] = op.outputs[0]
    found = match(plan.activations, last, "activations", by_part=True, lenient=later)
    for name, (_, layout) in found.items():
        _check_rank(f"what {name} returns", layout, workload.values[last[name]].shape)
    return {last[name]: layout for name, (_, layout) in found.items()}
