"""Choose, for one mesh axis, what every op and every free source does, at the least cost.

A labelling problem: each op picks one of its `choices`, each free source (an undeclared parameter, an
input) one placement; a value made in one placement and wanted in another pays for the conversion once,
however many ops want it. As an integer program over

    x[o, c]        op o takes choice c, 0 or 1                                       `add_ops`
    y[v, a]        source v starts in placement a, 0 or 1                            `add_sources`
    z[v, a]        value v ends in placement a, where its sink leaves several        `_sink`
    f[v, u, a, b]  use u of value v takes it as b from where it is made as a         `_transport`
    g[v, a, b]     v is converted from a to b at all                                 `_transport` (paid)

    minimise     sum seconds(o, c) x[o, c]          roofline and exchanges inside    `_op_seconds`
               + sum seconds(v, a) y[v, a]          the optimizer's update           `_update_seconds`
               + sum seconds(v, a, b) g[v, a, b]    conversions, dearer where the    `_prices`,
                                                    user declared a cut, cheaper     `_aversion`,
                                                    where a step has them once       `AxisTask.share`
    over         the choices that pins, written layouts and constants leave          `_pinned`, `add_ops`
    subject to   sum_c x[o, c] = 1,  sum_a y[v, a] = 1,  sum_a z[v, a] = 1
                 sum_b f[v, u, a, b] = sum of the x[o, c] that make v as a  (or y[v, a])
                 sum_a f[v, u, a, b] = sum of the x[u, c] that take v as b  (or z[v, b])
                 f[v, u, a, b] <= g[v, a, b]        for every use u: one conversion serves all

Per use the f are a transport plan between what is made and what is wanted, which is integral on trees and
close to it on real graphs, so that f and g need not be asked to be whole. Ops that repeat (the layers of a
model) share one x, and equal edges one f, counted as often as they are (`collect_edges`).

Mesh axes are solved one after another, outermost first; `Progress` carries what earlier axes cut.
Solved by HiGHS (`integer_program.py`). Left out: memory, and what two axes could only gain together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from hyperparallel.cluster import Rates
from hyperparallel.errors import PlanError, Words
from hyperparallel.integer_program import IntegerProgram
from hyperparallel.shard.axis_problem import (
    BATCH_GATHER_FACTOR,
    DECLARED_GATHER_FACTOR,
    AxisDecision,
    AxisTask,
    Progress,
)
from hyperparallel.shard.axis_states import (
    AxisState,
    Choice,
    Cut,
    choices,
    held_bytes,
    inner_periods,
    uneven_units,
)
from hyperparallel.shard.op_seconds import carried_seconds, op_seconds
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import facts_of
from hyperparallel.workload import Op, Workload

Have = dict[AxisState, list[int]]
"""For each placement, the columns whose sum says whether it is there; [] never, [ALWAYS] always."""


class _AxisProgram:
    def __init__(
        self,
        workload: Workload,
        rules: Mapping[str, Rule],
        task: AxisTask,
        done: Progress,
        rates: Rates,
    ) -> None:
        self.workload, self.rules, self.task = workload, rules, task
        self.done, self.rates = done, rates
        self.program = IntegerProgram()
        # A column that is always 1 stands for what has no choice, so that edges need no second form.
        self.one = self.program.column()
        self.program.row([self.one], lower=1.0, upper=1.0)
        self.ids: dict[Hashable, int] = {}
        self.columns: dict[int, list[int]] = {}
        self.options: dict[int, list[Choice]] = {}
        self.seconds: dict[int, list[float]] = {}
        self.makes: dict[int, list[Have | None]] = {}
        self.takes: dict[int, list[Have]] = {}
        self.op_key: dict[str, int] = {}
        self.alike: dict[Hashable, list[tuple[Rule, int]]] = defaultdict(list)
        self.source_key: dict[str, int] = {}
        self.sink_columns: dict[str, list[int]] = {}
        self.made: dict[str, Have] = {}
        self.made_by: dict[str, tuple[int, int]] = {}
        self.edges: dict[Hashable, float] = defaultdict(float)
        self.edge_values: dict[Hashable, tuple[str, dict[bool, list[Have]]]] = {}

    def _id(self, thing: Hashable) -> int:
        """A small number that stands for an equal thing, cheap to hash."""
        return self.ids.setdefault(thing, len(self.ids))

    def add_sources(self) -> None:
        """Columns of the sources that may choose; alike ones of repeated blocks share them."""
        for value, allowed in self.task.sources.items():
            # A parameter of every layer is one decision: the program grows with kinds of layers, not with
            # their number.
            key = self._id(("source", self._users(value) or value, allowed, value in self.task.declared))
            seconds = [self._update_seconds(value, place) for place in allowed]
            if key not in self.columns:
                self.columns[key] = [self.one]
                # Fixed sources cost what they cost: their update is not in the objective.
                if len(allowed) > 1:
                    self.columns[key] = [self.program.column(0.0, integral=True) for _ in allowed]
                    self.program.row(self.columns[key], lower=1.0, upper=1.0)
                    self._spend(self.columns[key], seconds)
            # Each further layer adds its seconds to the shared columns, so that the objective is that of the
            # whole model.
            elif len(allowed) > 1:
                self._spend(self.columns[key], seconds)
            self.source_key[value] = key
            self.made[value] = {p: [c] for p, c in zip(allowed, self.columns[key], strict=True)}
            self.made_by[value] = (key, 0)

    def _spend(self, columns: list[int], seconds: list[float]) -> None:
        for column, cost in zip(columns, seconds, strict=True):
            self.program.costs[column] += cost

    def _users(self, value: str) -> frozenset[tuple[str, str, int]] | None:
        """The operands in one repeated block that a value is; None where others use it too."""
        users = self.workload.consumers[value]
        indexes = {op.block[1] if op.block else None for op in users}
        if len(indexes) != 1 or None in indexes:
            return None
        # With the operand's position: the two factors of a product of parameters want different cuts.
        return frozenset(
            (op.block[0], op.block[2], i)
            for op in users
            if op.block
            for i, operand in enumerate(op.inputs)
            if operand == value
        )

    def _update_seconds(self, value: str, place: AxisState) -> float:
        touched = self.task.update_bytes.get(value, 0.0) / self.done.values[value] / self.task.micro_batches
        return held_bytes(touched, place, self.task.size) / self.rates.memory_bytes_per_second

    def add_ops(self, constant: frozenset[str]) -> None:
        """Columns of every op's choices; an op of a repeated block shares those of its likes."""
        # Looked for in the whole program: ops that see one dim through different views must be able to meet.
        units = uneven_units(self.rules.values(), self.task.size)
        periods = inner_periods(self.rules.values(), self.task.size)
        for op in self.workload.ops:
            rule, taken = self.rules[op.name], self.done.factors[op.name]
            shared: Hashable = (op.block[0], op.block[2]) if op.block else op.name
            pins = tuple(self.task.pins.get(value) for value in op.outputs if value)
            fixed = self.task.fixed.get(op.name)
            alike = self.alike[shared, tuple(taken.items()), pins, tuple(fixed or ())]
            # Same place in a repeated block, but cut otherwise before, or with other sizes: its own decision.
            key = next((k for known, k in alike if known is rule or known == rule), -1)
            if key < 0:
                key = self._id(("op", shared, len(self.columns)))
                alike.append((rule, key))
                # Other ops' local forms must know which elements of a factor they get, and get a plain run of
                # them.
                inner = periods if facts_of(op.target).orderless else None
                options = list(fixed or choices(rule, taken, self.task.size, units, inner))
                # Constants are made once and kept whole: cutting them would save nothing every step.
                if op.name in constant and op.inputs:
                    options = options[:1]
                self._add_op(key, op, rule, self._pinned(op, options), op.name in constant)
            self._spend(self.columns[key], self.seconds[key])
            self.op_key[op.name] = key
            for position, value in enumerate(op.outputs):
                have = self.makes[key][position]
                if value is not None and have is not None:
                    self.made[value] = have
                    self.made_by[value] = (key, position)

    def _add_op(self, key: int, op: Op, rule: Rule, options: list[Choice], is_constant: bool) -> None:
        self.options[key] = options
        columns = [self.program.column(0.0, integral=True) for _ in options]
        self.program.row(columns, lower=1.0, upper=1.0)
        self.columns[key] = columns
        self.seconds[key] = [0.0 if is_constant else self._op_seconds(op, rule, o) for o in options]
        self.makes[key] = [
            _by_placement(columns, [o.outputs[i] for o in options]) if value else None
            for i, value in enumerate(op.outputs)
        ]
        self.takes[key] = [
            _by_placement(columns, [o.inputs[i] for o in options]) for i in range(len(op.inputs))
        ]

    def _pinned(self, op: Op, options: list[Choice]) -> list[Choice]:
        for position, value in enumerate(op.outputs):
            if value is not None and value in self.task.pins:
                # Choices are ruled out before there are columns: none left is an error that names the module,
                # where the program would only be infeasible.
                wanted = self.task.pins[value]
                options = [o for o in options if o.outputs[position] == wanted]
                if not options:
                    raise PlanError(
                        f"activations: what {op.module or 'the model'} returns",
                        f"{wanted} by {self.task.name}",
                        f"a layout that {op.target} can make",
                    )
        return options

    def _op_seconds(self, op: Op, rule: Rule, choice: Choice) -> float:
        # Whole on this axis: what outer axes cut is another rank's already.
        held = {
            name: self.workload.values[name].num_bytes / self.done.values[name]
            for name in (*op.inputs, *op.outputs)
            if name
        }
        taken = self.done.factors[op.name]
        return op_seconds(op, rule, choice, taken, held, self.task.name, self.task.size, self.rates)

    def collect_edges(self) -> None:
        """Group equal (producer, set of consumers) patterns, so that repeated layers share one edge."""
        wants: dict[str, dict[tuple[int | str, int], Have]] = defaultdict(dict)
        for op in self.workload.ops:
            key = self.op_key[op.name]
            for position, value in enumerate(op.inputs):
                # By columns, not by ops: a mask that every layer reads is one need, converted once.
                wants[value][key, position] = self.takes[key][position]
        for value, sink in self.task.sinks.items():
            # A gradient ends where its parameter is: such sinks are alike if the parameters share a column.
            shared = self._id(self.made_by[sink] if isinstance(sink, str) else ("sink", value, sink))
            if not isinstance(sink, str) and len(sink) == 1:
                shared = self._id(("sink", sink, value in self.task.gradients))
            wants[value]["sink", shared] = self._sink(value, sink)
        for value, needs in wants.items():
            num_bytes = self.workload.values[value].num_bytes / self.done.values[value]
            # Equal in all that `_prices` reads, so that one flow, counted as often as there are such edges,
            # prices all.
            key_of_edge = (self.made_by[value], frozenset(needs), num_bytes, value in self.task.declared)
            self.edges[key_of_edge] += 1.0
            if key_of_edge not in self.edge_values:
                self.edge_values[key_of_edge] = value, self._by_time(value, needs)

    def _by_time(self, value: str, needs: Mapping[tuple[int | str, int], Have]) -> dict[bool, list[Have]]:
        """Needs that conversions are shared among: True for those of the end of the step, of gradients."""
        found: dict[bool, list[Have]] = defaultdict(list)
        for (user, _), need in needs.items():
            # With one micro-batch every use ends the step, and may share the sink's conversion.
            ends = user == "sink" or self.task.micro_batches == 1
            found[ends and value in self.task.gradients].append(need)
        return found

    def _sink(self, value: str, sink: tuple[AxisState, ...] | str) -> Have:
        if isinstance(sink, str):
            return self.made[sink]
        if len(sink) == 1:
            return {sink[0]: [self.one]}
        # Not integral: they only follow f, which is.
        columns = [self.program.column(0.0) for _ in sink]
        self.program.row(columns, lower=1.0, upper=1.0)
        self.sink_columns[value] = columns
        return {p: [c] for p, c in zip(sink, columns, strict=True)}

    def add_edges(self) -> None:
        for key, count in self.edges.items():
            value, needs = self.edge_values[key]
            have = self.made[value]
            num_bytes = self.workload.values[value].num_bytes / self.done.values[value]
            # What ends the step happens once, what is used in it once a micro-batch: they can't share a
            # conversion, for they are priced apart.
            for last, group in needs.items():
                price = self._prices(value, have, group, num_bytes, last)
                paid: dict[tuple[AxisState, AxisState], int] = {}
                for need in group:
                    self._transport(have, need, price, count, paid if len(group) > 1 else None)

    def _prices(
        self, value: str, have: Have, needs: Iterable[Have], num_bytes: float, last: bool
    ) -> dict[tuple[AxisState, AxisState], float]:
        wanted = {place for need in needs for place in need}
        n, axis, whole = self.task.size, self.task.name, self.workload.values[value]
        return {
            (a, b): carried_seconds(a, b, whole, num_bytes, n, axis, self.rates, self.task.reduce)
            * self._aversion(value, a, b)
            * (self.task.share(a, b) if last else 1.0)
            for a in have
            for b in wanted
        }

    def _aversion(self, value: str, src: AxisState, dst: AxisState) -> float:
        """How much dearer than it is a conversion counts: what was declared cut is to be computed with."""
        # Dear, not forbidden: an op that mixes rows leaves nothing else.
        if isinstance(src, Cut) and self.task.keeps_cuts:
            return BATCH_GATHER_FACTOR if src != dst else 1.0
        gathers = isinstance(src, Cut) and not isinstance(dst, Cut)
        return DECLARED_GATHER_FACTOR if gathers and value in self.task.declared else 1.0

    def _transport(
        self,
        have: Have,
        need: Have,
        price: Mapping[tuple[AxisState, AxisState], float],
        count: float,
        paid: dict[tuple[AxisState, AxisState], int] | None,
    ) -> None:
        """Tie one consumer's needs to what is made; conversions shared by several pay through `paid`."""
        into: dict[AxisState, list[int]] = defaultdict(list)
        for a, made in have.items():
            flows = []
            for b in need:
                cost = price[a, b] * count
                if math.isinf(cost):  # no step leads there: no column, and the rows below forbid it
                    continue
                # A single use pays by its own flow: most edges are such, and each saves a column and a row.
                shared = paid is not None and cost > 0
                flow = self.program.column(0.0 if shared else cost)
                if shared and paid is not None:
                    if (a, b) not in paid:
                        paid[a, b] = self.program.column(cost)
                    # g >= f for each use, not g >= their sum: one conversion serves all that want it.
                    self.program.at_least([paid[a, b]], [flow])
                flows.append(flow)
                into[b].append(flow)
            # What leaves a placement is what is made in it; below, what arrives in one is what is taken.
            self.program.row(flows, made)
        for b, columns in need.items():
            self.program.row(into[b], columns)

    def decision(self, seconds: float) -> AxisDecision:
        try:
            values, cost, bound = self.program.solve(seconds)
        except RuntimeError as error:
            allowed = f"a program that is decided within {seconds:g} s on this machine"
            given = Words(f"{len(self.workload.ops)} ops: {error}")
            field = f"mesh axis {self.task.name}"
            raise PlanError(field, given, allowed, "layouts for more params") from None

        def chosen(columns: list[int]) -> int:
            return max(range(len(columns)), key=lambda i: values[columns[i]])  # 0.9999 is 1 to a solver

        ops = {
            op.name: self.options[key][chosen(self.columns[key])]
            for op in self.workload.ops
            for key in (self.op_key[op.name],)
        }
        sources = {
            value: allowed[chosen(self.columns[self.source_key[value]])]
            for value, allowed in self.task.sources.items()
        }
        sinks: dict[str, AxisState] = {}
        for value, sink in self.task.sinks.items():
            if isinstance(sink, str):
                sinks[value] = sources[sink]
            else:
                sinks[value] = sink[0] if len(sink) == 1 else sink[chosen(self.sink_columns[value])]
        return AxisDecision(self.task.name, self.task.size, ops, sources, sinks, cost, bound)


def _by_placement(columns: list[int], places: Sequence[AxisState | None]) -> Have:
    have: Have = defaultdict(list)
    for column, place in zip(columns, places, strict=True):
        if place is not None:
            have[place].append(column)
    return have


def solve_axis(
    workload: Workload,
    rules: Mapping[str, Rule],
    task: AxisTask,
    done: Progress,
    rates: Rates,
    *,
    constant: frozenset[str] = frozenset(),
    seconds: float = 20.0,
) -> AxisDecision:
    """Decide one axis and record its cuts in `done`."""
    program = _AxisProgram(workload, rules, task, done, rates)
    program.add_sources()
    program.add_ops(constant)
    program.collect_edges()
    program.add_edges()
    decision = program.decision(seconds)
    done.record(workload, decision)
    return decision
