"""Turn the joint graph of the whole model into the program of one rank.

Every op is replaced by its local form (`localise`), every place where a value is made in one layout and
wanted in another gets the nodes that carry it over (`redistribute`), once per layout wanted. Gradients
end in the layout their parameter is stored in, which is where data-parallel reduction comes from. With
fsdp a parameter is gathered at its first use, and with zero=3 gathered again for the backward; one that
is used in fewer bits is cast before it is gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.capture.capture import Captured
from hyperparallel.graph.capture.extract import module_of
from hyperparallel.graph.local.local_op import FactorPiece, LocalOp
from hyperparallel.graph.local.localise import localise
from hyperparallel.graph.passes.pairs import is_view
from hyperparallel.graph.passes.redistribute import Redistributor
from hyperparallel.graph.passes.write_region import write_region
from hyperparallel.graph.program import RankProgram, Transfer
from hyperparallel.graph.region.record import RegionForward
from hyperparallel.plan.decide import Decisions
from hyperparallel.shard.op_seconds import reduce_dtype
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.spec import FactorCut, Spec, make_spec, ways
from hyperparallel.workload import Value, Workload

aten = torch.ops.aten


def partition(
    captured: Captured,
    workload: Workload,
    rules: Mapping[str, Rule],
    decisions: Decisions,
    rank: int,
    *,
    defer: bool = False,
) -> RankProgram:
    """The program of `rank` (a rank of the plan's mesh).

    defer: leave gradients pending where that takes no more memory (`gradient_reduction` does the rest later).
    """
    return _Partition(captured, workload, rules, decisions, rank, defer).run()


def gradient_reduction(program: RankProgram, workload: Workload, decisions: Decisions) -> RankProgram:
    """The program that takes deferred gradients to the layouts their parameters are stored in."""
    graph = fx.Graph()
    places: dict[str, fx.Node] = {}
    for name in program.grads:
        places[name] = graph.placeholder(f"grad_{len(places)}")
        places[name].meta.update(_REDUCTION)
    results = {
        name: _reduced(place, name, program, workload.values[workload.grads[name]], decisions)
        for name, place in places.items()
    }
    graph.output(tuple(results.values()))
    return RankProgram(
        graph=graph,
        rank=program.rank,
        params={},
        buffers={},
        inputs={name: node.name for name, node in places.items()},
        tangents={},
        results=[("grad", name) for name in results],
        input_specs=program.grad_specs,
        output_specs={},
        grad_specs={name: decisions.stored[name] for name in results},
        rates=decisions.rates,
        in_flight_bytes=decisions.plan.in_flight_bytes,
    )


_REDUCTION = {"backward": True, "constant": False, "module": ""}


def _reduced(place: fx.Node, name: str, program: RankProgram, value: Value, decisions: Decisions) -> fx.Node:
    """Take one deferred gradient to the layout of its stored parameter."""

    def emit(fn: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = place.graph.call_function(fn, args, kwargs)
        node.meta.update(_REDUCTION)
        return node

    def collect(node: fx.Node, kind: str, axes: Any, num_bytes: int, dtype: str, held: int) -> None:
        why = f"the gradient of {name} is kept as the parameter is"
        node.meta["transfer"] = Transfer(
            kind, axes, num_bytes, value.name, "", True, why, dtype, held_bytes=held
        )

    move = Redistributor(
        program.rank, value, decisions.plan.reduce, emit, collect, decisions.step_seconds(value.dtype)
    )
    reduced: fx.Node = move(place, program.grad_specs[name], decisions.stored[name])
    return reduced


class _Partition:
    def __init__(
        self,
        captured: Captured,
        workload: Workload,
        rules: Mapping[str, Rule],
        decisions: Decisions,
        rank: int,
        defer: bool,
    ) -> None:
        self.defer = defer
        self.captured, self.workload, self.rules, self.decisions = captured, workload, rules, decisions
        self.mesh, self.rank = decisions.mesh, rank
        self.at = self.mesh.coordinate(rank)
        self.ops = {op.name: op for op in workload.ops}
        self.origins = {node.name: node for node in captured.graph.nodes}
        self.graph = fx.Graph()
        self.made: dict[str, tuple[Any, Spec]] = {}
        self.converted: dict[tuple[str, Spec, bool], Any] = {}
        self.stored = {workload.params[n]: spec for n, spec in decisions.stored.items()}
        self.casts = {cast: value for value, casts in workload.casts.items() for cast in casts}
        self.pieces: dict[tuple[int, FactorCut], FactorPiece] = {}
        self.regather = decisions.plan.zero == 3
        self.node: fx.Node | None = None
        self.backward = self.constant = False
        self.module = self.reason = ""

    def run(self) -> RankProgram:
        for node in self.captured.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._call(node)
            elif node.op == "get_attr":
                raise AssertionError(f"captured graphs hold no attributes: {node.target}")
        return self._finish()

    def _placeholder(self, node: fx.Node) -> None:
        # Parameters come as they are stored; the way to the layout of their use is part of the program.
        spec = self.stored.get(node.name) or self.decisions.sources[node.name]
        self.module, self.backward = "", node.name in self.workload.tangents.values()
        # A buffer that the forward changes is another tensor at every step.
        fixed = {n: v for n, v in self.workload.buffers.items() if n not in self.workload.mutations}
        self.constant = node.name in fixed.values()
        self._made(node.name, self._noted(self.graph.placeholder(node.name)), spec)

    def _made(self, value: str, node: Any, spec: Spec) -> None:
        """Note the local node of a value; later passes see the whole value through "origin"."""
        self.made[value] = (node, spec)
        # A node may stand for two values (a view that changed nothing here): the first noted stays.
        if "spec" not in node.meta:
            node.meta["origin"], node.meta["spec"] = self.origins[value], spec

    def _noted(self, node: fx.Node) -> fx.Node:
        node.meta["backward"], node.meta["module"] = self.backward, self.module
        node.meta["constant"] = self.constant
        return node

    def _emit(self, fn: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._noted(self.graph.call_function(fn, args, kwargs))

    def _call(self, node: fx.Node) -> None:
        op, rule = self.ops[node.name], self.rules[node.name]
        in_specs, out_specs = self.decisions.operands[node.name]
        self.backward, self.module = op.backward, module_of(node)
        if self._cast_where_stored(node):
            return
        is_constant = node.name in self.decisions.constant
        # `op.inputs` lists operands as `take` meets them: args before kwargs, lists from within.
        wanted = iter(zip(op.inputs, in_specs, strict=True))
        self.reason = f"{op.target} needs it"

        def take(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                value, spec = next(wanted)
                return self._as(value, spec)
            if isinstance(arg, (list, tuple)):
                return [take(item) for item in arg]
            return arg

        args = tuple(take(arg) for arg in node.args)
        if isinstance(node.target, RegionForward):
            self.constant, self.reason = is_constant, f"the region {node.target.region.name} asks for it"
            results = write_region(node.target, args, self.rank, op, self._emit, self._note_transfer)
            for value, result, spec in zip(op.outputs, results, out_specs, strict=True):
                if value is not None and spec is not None:
                    self._made(value, result, spec)
            return
        kwargs = {key: take(arg) for key, arg in node.kwargs.items()}
        self.constant = is_constant
        cuts = self.decisions.cuts[node.name]
        local = LocalOp(
            op=op,
            rule=rule,
            target=node.target,  # type: ignore[arg-type]
            args=args,
            kwargs=kwargs,
            pieces={f: self._piece(rule.sizes[f], cut) for f, cut in cuts.items()},
            emit=self._emit,
            reduce=self._reduce,
        )
        for value, result, spec in zip(op.outputs, localise(local), out_specs, strict=True):
            if value is not None and spec is not None:
                self._made(value, result, spec)

    def _cast_where_stored(self, node: fx.Node) -> bool:
        """Cast the piece of a parameter that is gathered at use; what is gathered then is the cast."""
        if node.name not in self.casts:
            return False
        # Casting the piece and gathering 16 bits moves half the bytes of gathering first; equal bit for bit.
        value, self.constant = self.casts[node.name], False
        dtype = getattr(torch, self.workload.values[node.name].dtype)
        self.stored[node.name] = self.stored[value]
        cast = self._emit(aten._to_copy.default, self.made[value][0], dtype=dtype)
        self._made(node.name, cast, self.stored[value])
        return True

    def _piece(self, size: int, cut: FactorCut) -> FactorPiece:
        if (size, cut) not in self.pieces:
            self.pieces[size, cut] = FactorPiece(*cut.piece(size, self.mesh, self.at))
        return self.pieces[size, cut]

    def _as(self, value: str, spec: Spec) -> Any:
        """The local node of `value` laid out as `spec`."""
        node, have = self.made[value]
        if have == spec:
            return node
        # zero=3 frees what was gathered for the forward: a backward reader may not take that, and asks again.
        again = self.backward and self.regather and value in self.stored
        key = (value, spec, again)
        if key not in self.converted:
            # The way there is as constant as the value itself, whatever its reader is.
            outer = self.constant
            self.constant = bool(node.meta.get("constant"))
            converted = self._redistributor(value)(node, have, spec)
            if "spec" not in converted.meta:
                converted.meta["origin"], converted.meta["spec"] = self.origins[value], spec
            self.converted[key] = converted
            self.constant = outer
        return self.converted[key]

    def _redistributor(self, value: str) -> Redistributor:
        def collect(
            node: fx.Node, kind: str, axes: tuple[str, ...], num_bytes: int, dtype: str, held: int
        ) -> None:
            self._note_transfer(node, kind, axes, num_bytes, value, dtype, held)

        whole, reduce = self.workload.values[value], self.decisions.plan.reduce
        costs = self.decisions.step_seconds(whole.dtype)
        return Redistributor(self.rank, whole, reduce, self._emit, collect, costs)

    def _note_transfer(
        self, node: fx.Node, kind: str, axes: tuple[str, ...], num_bytes: int, value: str, dtype: str,
        held: int = 0,
    ) -> None:  # fmt: skip
        node.meta["transfer"] = Transfer(
            kind, axes, num_bytes, value, self.module, self.backward, self.reason, dtype, held_bytes=held
        )

    def _reduce(self, x: Any, how: str, factor: str, parts: int = 1) -> Any:
        """All-reduce inside an op, over the axes that cut one of its factors (see `LocalOp.reduce`)."""
        assert self.node is not None
        op, cuts = self.ops[self.node.name], self.decisions.cuts[self.node.name]
        if factor not in cuts:
            return x
        axes = cuts[factor].all_axes
        started = self._emit(communication.all_reduce_start, x, how, axes)
        n = ways(axes, self.mesh)
        # Local forms widen 16-bit floats before they sum (`local/reduction.py`).
        dtype = reduce_dtype(self.workload.values[op.inputs[0]].dtype, "sum", "float32")
        moved = parts * self._reduced_elements(factor, cuts) * getattr(torch, dtype).itemsize
        self._note_transfer(started, "all_reduce", axes, 2 * (n - 1) * moved // n, op.name, dtype)
        return self._emit(communication.wait, started)

    def _reduced_elements(self, factor: str, cuts: Mapping[str, FactorCut]) -> int:
        """Elements of what an op reduces over `factor`: its first operand without all that is summed."""
        assert self.node is not None
        rule = self.rules[self.node.name]
        kept = {f for dim in rule.outputs[0] or () for f in dim} - {factor}
        count = 1
        for f in (f for dim in rule.inputs[0] for f in dim if f in kept):
            cut = cuts.get(f, FactorCut(()))
            first = dict.fromkeys(self.mesh.names, 0)  # the fullest piece
            count *= cut.piece(rule.sizes[f], self.mesh, first)[1]
        return count

    def _grad_spec(self, name: str, value: str) -> Spec:
        """The layout in which the program leaves a gradient."""
        stored, kept = self.decisions.stored[name], self.decisions.accumulated(name)
        if not self.defer:
            return stored
        partial = self.made[value][1].partial
        # Pending on the axes that do not cut it while it accumulates; along the others it is reduced already.
        pending = {axis: how for axis, how in partial if how == "sum" and axis not in kept.axes}
        return make_spec(self.mesh, kept.dims, pending) if pending else stored

    def _owned(self, node: fx.Node, owned: set[fx.Node]) -> fx.Node:
        """A gradient that can be scaled or added to in place: a copy where its memory has another owner."""
        # Two gradients may be one tensor (those of x + y): each is scaled once, not both twice.
        base, spread = node, False
        while is_view(base):
            spread |= base.target is aten.expand.default
            base = base.all_input_nodes[0]
        if spread or base in owned or base.op == "placeholder":
            return self._emit(aten.clone.default, node, memory_format=torch.contiguous_format)
        owned.add(base)
        return node

    def _finish(self) -> RankProgram:
        work, graph = self.workload, self.graph
        # From here on what brings results to where they end: gradients first, in the phase of the backward.
        self.backward, self.module, self.constant = True, "", False
        results: dict[tuple[str, str], fx.Node] = {}
        owned: set[fx.Node] = set()
        grad_specs = {}
        for name, value in work.grads.items():
            self.reason = f"the gradient of {name} is kept as the parameter is"
            self.module = name.rpartition(".")[0]
            grad_specs[name] = self._grad_spec(name, value)
            results["grad", name] = self._owned(self._as(value, grad_specs[name]), owned)
        self.reason, self.module = "it is a result of the program", ""
        for path, value in work.input_grads.items():
            laid_out = self._as(value, self.decisions.outputs[value])
            results["input_grad", path] = self._owned(laid_out, owned)
        self.backward = False
        for role, group in (("output", work.outputs), ("mutation", work.mutations)):
            for path, value in group.items():
                results[role, path] = self._as(value, self.decisions.outputs[value])
        graph.output(tuple(results.values()))

        local = {value: node for value, (node, _) in self.made.items()}

        def placeholders(group: Mapping[str, str]) -> dict[str, str]:
            return {name: local[value].name for name, value in group.items()}

        return RankProgram(
            graph=graph,
            rank=self.rank,
            params=placeholders(work.params),
            buffers=placeholders(work.buffers),
            inputs=placeholders(work.inputs),
            tangents=placeholders(work.tangents),
            results=list(results),
            input_specs={p: self.decisions.sources[v] for p, v in work.inputs.items()},
            output_specs={p: self.decisions.outputs[v] for p, v in work.outputs.items()},
            grad_specs=grad_specs,
            rates=self.decisions.rates,
            in_flight_bytes=self.decisions.plan.in_flight_bytes,
        )
