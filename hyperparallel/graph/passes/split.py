"""Cut the joint graph of a model into parts, each a joint graph of its own.

The graph is captured once. Every node belongs to one part, by the module that ran it; a backward node
belongs with the forward that it differentiates. A value made in one part and read in another crosses: where
it is read it is an input (activations) or a tangent (gradients), where it is made a result. So a part is
captured like a whole model, and everything behind capture (layouts, rank programs, phases) works on it as
it is.

    part 0   inputs: batch               outputs: h            tangents: grad of h    grads of its parameters
    part 1   inputs: batch, h            outputs: loss         tangents: of the loss  grads, and that of h

Nodes that no pattern names (code of the model itself, sums of gradients) go with what they read, or with
what reads them if that is parameters alone. What depends on the batch and constants alone (masks,
positions) is made again in each part that reads it, which is cheaper than sending it. Activations cross
towards later parts, gradients towards earlier ones; a cut for which that is not so is refused.

A parameter that several parts use belongs to the first: it crosses to the others as an activation does, and
the gradient comes back and is summed there, as it is in the whole graph. One device draws random numbers in
the order of the forward: `PartCut.draws` says which part draws what, so that ranks of other parts can draw
and drop the same (`runtime/exec/replay.py`), and every number is that of the whole model.

Leaves out where parts run (`graph/parts.py`) and when (a schedule).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx

from hyperparallel.errors import PlanError, Words, nearest
from hyperparallel.graph.capture.capture import Captured, returned
from hyperparallel.graph.capture.extract import module_of
from hyperparallel.graph.capture.naming import Names
from hyperparallel.graph.capture.repeat_blocks import Result, is_backward
from hyperparallel.shard.rules.table import facts_of

EDGE = "edge "
"""What the name of an input or result begins with that another part makes or reads."""


@dataclass(frozen=True)
class Crossing:
    """A value of the joint graph made in part `source` and read in part `target`."""

    value: str
    source: int
    target: int
    backward: bool

    @property
    def name(self) -> str:
        """Its name among the inputs and results of the parts."""
        return EDGE + self.value


@dataclass(frozen=True)
class PartCut:
    """The parts of a captured model in order, what crosses between them, and each one's random ops."""

    parts: tuple[Captured, ...]
    crossings: tuple[Crossing, ...]
    draws: tuple[tuple[fx.Node, ...], ...]


def split_parts(
    captured: Captured, patterns: Sequence[Sequence[str]], *, lenient: bool = False
) -> PartCut:
    """Cut a captured joint graph; `patterns` names the modules of each part, in the order of the forward.

    A pattern names a module and all below it, a star is one part of the name; the longest match counts.
    lenient: a pattern may match nothing, as in a further program in which a module does nothing.
    Raises `PlanError` for a pattern that matches nothing, a buffer that two parts change, random numbers that
    other parts could not draw alike, and parts between which activations would go backwards.
    """
    return _Split(captured, patterns, lenient).run()


class _Split:
    def __init__(self, captured: Captured, patterns: Sequence[Sequence[str]], lenient: bool) -> None:
        self.captured, self.patterns, self.lenient = captured, patterns, lenient
        self.nodes = [n for n in captured.graph.nodes if n.op != "output"]
        self.by_name = {node.name: node for node in self.nodes}
        self.results = returned(captured.graph, captured.results)
        self.role = {n: n.meta["role"] for n in self.nodes if n.op == "placeholder"}
        self.shared = self._shared()
        self.part: dict[fx.Node, int] = {}
        self.forward_of: dict[tuple[str, object], int] = {}

    def run(self) -> PartCut:
        self._assign()
        self._own_sources()
        crossings = self._crossings()
        numbers = range(len(self.patterns))
        draws = tuple(tuple(n for n in self.nodes if _is_random(n) and self.part[n] == i) for i in numbers)
        return PartCut(tuple(self._cut(part, crossings) for part in numbers), crossings, draws)

    def _shared(self) -> set[fx.Node]:
        """What each part may make for itself: it depends on the batch and fixed buffers alone."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                role, name = self.role[node]
                if role == "input" or (role == "buffer" and name not in self.captured.mutations):
                    found.add(node)
            # No parameter on the way: cheap to make again, and no gradient goes through it.
            elif found.issuperset(node.all_input_nodes) and not _is_random(node):
                found.add(node)
        return found

    def _assign(self) -> None:
        """Give every node that is not shared its part."""
        named = _Named(self.captured, self.patterns, self.lenient)
        todo = [n for n in self.nodes if n.op == "call_function" and n not in self.shared]
        drawn = 0
        for node in todo:
            found, backward = named.part(module_of(node)), is_backward(node)
            # A sum of gradients has the number of a forward node that it does not differentiate.
            if found is None and backward and not node.meta.get("is_gradient_acc"):
                found = self.forward_of.get(_number(node))
            if found is None:
                found = self._with_what_it_reads(node, backward)
                if _is_random(node):  # in any part behind the last that drew, its numbers are the same
                    found = max(found or 0, drawn)
            if found is not None:
                self._give(node, found)
            if _is_random(node):
                self._check_draw(node, drawn)
                drawn = self.part[node]
        for node in todo:
            self.part.setdefault(node, 0)

    def _check_draw(self, node: fx.Node, drawn: int) -> None:
        """Refuse what ranks of other parts could not draw too. drawn: the part that drew before."""
        given = Words(f"{node.target} in {module_of(node) or 'the model itself'} (part {self.part[node]})")
        if is_backward(node):
            raise PlanError("parts", given, "random numbers that are drawn in the forward")
        if not facts_of(str(node.target)).random or facts_of(str(node.target)).draws_by_value:
            allowed = "random ops that draw equally often whatever values they see, outside a fused kernel"
            instead = "one mesh (parallelize or TrainStep), or a probability of 0"
            raise PlanError("parts", given, allowed, instead)
        if self.part[node] < drawn:
            allowed = f"parts in the order in which the forward draws: part {drawn} drew before it"
            raise PlanError("parts", given, allowed)

    def _give(self, node: fx.Node, part: int) -> None:
        """Give a node its part, and to that part what was left for a reader to decide."""
        self.part[node] = part
        if not is_backward(node):
            self.forward_of[_number(node)] = part
        for used in node.all_input_nodes:
            if used.op == "call_function" and used not in self.part and used not in self.shared:
                self._give(used, part)

    def _with_what_it_reads(self, node: fx.Node, backward: bool) -> int | None:
        """None for a node that reads parameters only (a transposed weight): it goes with who reads it."""
        known = [n for n in node.all_input_nodes if n in self.part]
        gradients = [self.part[n] for n in known if is_backward(n)]
        if backward and gradients:
            # A sum of gradients goes to the earliest part that adds to it: gradients cross backwards only.
            return min(gradients)
        # The latest part that it reads from: activations cross forwards only.
        return max((self.part[n] for n in known), default=None)

    def _own_sources(self) -> None:
        """Give parameters, changed buffers and tangents the part that holds them."""
        results = {r.name: r.node for r in self.results if r.role == "output"}
        for node in self.role:
            if node in self.shared:
                continue
            role, name = self.role[node]
            readers = sorted({self.part[user] for user in node.users if user in self.part})
            if role == "tangent":  # it comes in where its result goes out
                self.part[node] = self.part.get(results[name], 0)
                continue
            if role == "buffer" and len(readers) > 1:
                allowed = "parts of which one alone uses a buffer that the forward changes"
                instead = f"parts in which one holds all modules that use {name}"
                raise PlanError("parts", Words(f"buffer {name} in parts {readers}"), allowed, instead)
            self.part[node] = readers[0] if readers else 0

    def _is_backward(self, node: fx.Node) -> bool:
        return is_backward(node) or self.role.get(node, ("", ""))[0] == "tangent"

    def _crossings(self) -> tuple[Crossing, ...]:
        found: dict[Crossing, None] = {}
        for node in self.nodes:
            for used in node.all_input_nodes if node in self.part else ():
                if used not in self.part or self.part[used] == self.part[node]:
                    continue
                source, target, backward = self.part[used], self.part[node], self._is_backward(used)
                # A gradient to a later part, an activation to an earlier one: no order of parts runs that.
                if backward != (target < source):
                    self._refuse(used, node)
                found[Crossing(used.name, source, target, backward)] = None
        return tuple(found)

    def _refuse(self, used: fx.Node, node: fx.Node) -> None:
        what = "the gradient" if self._is_backward(used) else "what"
        given = Words(
            f"{what} {used.name} that {module_of(used) or 'the model itself'} (part {self.part[used]}) makes "
            f"is read by {module_of(node) or 'the model itself'} (part {self.part[node]})"
        )
        raise PlanError("parts", given, "parts in the order in which the forward goes through them")

    def _cut(self, part: int, crossings: Sequence[Crossing]) -> Captured:
        """The joint graph of one part."""
        results = [r for r in self.results if self.part.get(r.node, 0) == part]  # a shared one: the first's
        sent = dict.fromkeys((c.backward, c.name, c.value) for c in crossings if c.source == part)
        for backward in (False, True):
            role = "input_grad" if backward else "output"
            made = [Result(role, name, self.by_name[v]) for b, name, v in sent if b == backward]
            # Behind the other outputs, and gradients last: the order of results that capture gives.
            place = len(results) if backward else sum(r.role == "output" for r in results)
            results[place:place] = made
        received = {self.by_name[c.value]: c for c in crossings if c.target == part}
        # Not walked further: what was received is an input here, and what made it belongs to another part.
        needed = set(received)
        todo = [r.node for r in results] + [n for n, where in self.part.items() if where == part]
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo += node.all_input_nodes
        return self._captured([n for n in self.nodes if n in needed], received, results)

    def _captured(
        self, nodes: Sequence[fx.Node], received: Mapping[fx.Node, Crossing], results: Sequence[Result]
    ) -> Captured:
        """Copies of `nodes` as a graph of their own; what was received becomes placeholders."""
        graph, names = fx.Graph(), Names()
        copies: dict[fx.Node, fx.Node] = {}
        own = [n for n in nodes if n.op == "placeholder" and n not in received]
        order = [n for n in own if self.role[n][0] != "tangent"]
        # Activations from other parts behind the batch, gradients behind the tangents: capture's order.
        # Parameters of other parts last: the first tensor of a batch tells how many rows there are.
        forward = [n for n, c in received.items() if not c.backward]
        order += sorted(forward, key=lambda n: n.op == "placeholder")
        order += [n for n in own if self.role[n][0] == "tangent"]
        order += [n for n, c in received.items() if c.backward]
        for node in order:
            copies[node] = copy = graph.placeholder(node.name)
            copy.meta = dict(node.meta)
            if node in received:
                copy.meta = {"val": node.meta["val"]}
                copy.meta["role"] = ("tangent" if received[node].backward else "input", received[node].name)
            role, name = copy.meta["role"]
            names.of(role)[name] = copy.name
        for node in nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[r.node] for r in results))
        whole = self.captured
        return Captured(
            graph_module=fx.GraphModule(torch.nn.Module(), graph),
            params=names.params,
            param_aliases={a: n for a, n in whole.param_aliases.items() if n in names.params},
            buffers=names.buffers,
            inputs=names.inputs,
            tangents=names.tangents,
            results=[(r.role, r.name) for r in results],
            in_spec=whole.in_spec,
            out_spec=whole.out_spec,
            buffer_aliases={a: n for a, n in whole.buffer_aliases.items() if n in names.buffers},
        )


def _is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers: by the tables, or in a kernel that has a dropout probability."""
    if node.op != "call_function" or facts_of(str(node.target)).random:
        return node.op == "call_function"
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p", 0.0)) if "dropout_p" in names else True


class _Named:
    """Which part the patterns give a module."""

    def __init__(self, captured: Captured, patterns: Sequence[Sequence[str]], lenient: bool) -> None:
        calls = (n for n in captured.graph.nodes if n.op == "call_function")
        modules = {*map(module_of, calls), *(name.rpartition(".")[0] for name in captured.params)}
        known = sorted({prefix for module in modules for prefix in _prefixes(module)})
        self._known: dict[str, int] = {}
        for part, group in enumerate(patterns):
            for pattern in group:
                hits = [name for name in known if _fits(name, pattern)]
                if not hits and not lenient:
                    close = nearest(pattern, known)
                    hint = f" (nearest: {close})" if close else ""
                    raise PlanError("parts", pattern, f"patterns that match modules of the model{hint}")
                for name in hits:
                    self._add(name, part)

    def _add(self, name: str, part: int) -> None:
        if self._known.setdefault(name, part) != part:
            given = Words(f"{name} in parts {self._known[name]} and {part}")
            raise PlanError("parts", given, "patterns that give a module one part")

    def part(self, module: str) -> int | None:
        """The part of a module, by the longest of its prefixes that a pattern matches."""
        # Longest first: "blocks.1" may go elsewhere than "blocks".
        found = (self._known[p] for p in reversed(_prefixes(module)) if p in self._known)
        return next(found, None)


def _number(node: fx.Node) -> tuple[str, object]:
    """What a backward node shares with the forward node that it differentiates.

    torch numbers forward nodes and gives a backward node the same number. Copied blocks
    (`capture/repeat_blocks.py`) have the numbers of their pattern; the module tells them apart.
    """
    return module_of(node), node.meta.get("seq_nr", node.name)


def _prefixes(module: str) -> list[str]:
    """A module and the modules around it, outermost first.

    >>> _prefixes("layers.0.mlp")
    ['layers', 'layers.0', 'layers.0.mlp']
    """
    names = module.split(".") if module else []
    return [".".join(names[: i + 1]) for i in range(len(names))]


def _fits(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
