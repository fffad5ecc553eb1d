"""Cut the traced code of one rank at its collectives, in the same places on every rank.

What a rank computes may depend on the rank (a slice by `axis_index` that happens to be everything, an
extra term on the first rank), but the program around it must have the same nodes on all ranks. So the code
between two collectives becomes one call, a `Segment`, whatever is in it; what later segments need travels
in a tuple, the state. Collectives stay nodes of the program: they are counted, started early and waited
for late. After start g comes first what needs none of the results under way (it overlaps with them), then
the waits, then the rest; where a result is first needed is taken from all ranks together (`Outline`).

    state = segment(state, inputs...); start(state[0]); state = segment(state); state = segment(state, wait)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyperparallel.graph.collective import GroupMember
from hyperparallel.graph.region.ops import COLLECTIVE_OPS, ops
from hyperparallel.graph.region.rehearsal import TensorForm

aten = torch.ops.aten
End = fx.Node | TensorForm | None
"""A value that a stage ends with; a `TensorForm` is zeros of that form, None nothing."""


class Segment:
    """A stretch of one rank's local code: `(state, *new values) -> state`; equal in the same place.

    picks: which entries of the state `code` takes, before the new values. outs: where each entry of the
    next state is found: result i of `code`, value ~i that it was given, or None.
    """

    def __init__(
        self, key: tuple[Any, ...], module: fx.GraphModule, picks: Sequence[int], outs: Sequence[int | None]
    ) -> None:
        self.key, self.module, self.picks, self.outs = key, module, tuple(picks), tuple(outs)
        self.__name__ = "segment"  # fx names nodes after it
        self.code: Callable[..., Any] = module.forward

    def __call__(self, state: Sequence[Any], *new: Any) -> tuple[Any, ...]:
        given = [*[state[i] for i in self.picks], *new]
        made = self.code(*given)
        return tuple([None if i is None else made[i] if i >= 0 else given[~i] for i in self.outs])

    def through(self, code: Callable[..., Any]) -> Segment:
        """The same segment with another function in the place of its code."""
        twin = Segment(self.key, self.module, self.picks, self.outs)
        twin.code = code
        return twin

    def __eq__(self, other: object) -> bool:
        # By place, not by code: in one place all ranks have equal nodes, whatever is inside.
        return isinstance(other, Segment) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True)
class RegionStart:
    """A collective: its name, arguments behind the operand, axes, and where its operand is in the state.

    num_bytes: what this rank receives.
    """

    name: str
    args: tuple[Any, ...]
    axes: tuple[str, ...]
    operand: int
    num_bytes: int
    dtype: str


@dataclass(frozen=True)
class Run:
    """A segment, and the collectives (by number within the stage) whose results it takes."""

    segment: Segment
    waits: tuple[int, ...]


Steps = tuple[Run | RegionStart, ...]


@dataclass(frozen=True)
class Outline:
    """What all ranks must share of a stage.

    calls: each collective. uses: the gap (g: behind start g) where each one's result is first needed.
    overlaps: for each gap whether a segment of its own runs before the waits.
    """

    calls: tuple[tuple[Any, ...], ...]
    uses: tuple[int, ...]
    overlaps: tuple[bool, ...] = ()


class Code:
    """The nodes of one stage in order, and the values that it ends with."""

    def __init__(self, nodes: Sequence[fx.Node], results: Sequence[End]) -> None:
        self.results: list[End] = list(results)
        self.collectives = [n for n in nodes if n.target in COLLECTIVE_OPS]
        self.numbers = {n: i for i, n in enumerate(self.collectives)}
        self.gaps: list[list[fx.Node]] = [[]]
        for node in nodes:
            if node in self.numbers:
                self.gaps.append([])
            else:
                self.gaps[-1].append(node)

    def outline(self) -> Outline:
        """This rank's own outline, without overlaps."""
        calls = tuple((COLLECTIVE_OPS[n.target].name, n.args[-1], n.args[-2]) for n in self.collectives)
        return Outline(calls, tuple(map(self._first_use, self.collectives)))

    def _first_use(self, node: fx.Node) -> int:
        # Looked for from its own start on; a collective that takes the result needs it as well.
        begin = self.numbers[node]
        for gap in range(begin, len(self.collectives)):
            # The next start closes the gap: its operand has to be there by then.
            following = self.collectives[gap + 1 : gap + 2]
            if any(node in n.all_input_nodes for n in (*self.gaps[gap + 1], *following)):
                return gap
        # Not used by any node: only returned, which is behind the last start.
        return len(self.collectives) - 1

    def ready(self, gap: int, uses: Sequence[int]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes of a gap that run before its waits, and those that run behind them."""
        waited = {n for n in self.collectives[: gap + 1] if uses[self.numbers[n]] == gap}
        # In order, so that what depends on a late node is found late itself.
        late: set[fx.Node] = set(waited)
        for node in self.gaps[gap + 1]:
            if any(used in late for used in node.all_input_nodes):
                late.add(node)
        nodes = self.gaps[gap + 1]
        return [n for n in nodes if n not in late], [n for n in nodes if n in late]

    def overlaps(self, uses: Sequence[int]) -> tuple[bool, ...]:
        """For each gap whether this rank has something to do before its waits."""
        return tuple(bool(self.ready(g, uses)[0]) for g in range(len(self.collectives)))


def steps(
    code: Code, outline: Outline, key: tuple[Any, ...], state: Sequence[End], fresh: Sequence[End],
    kept: Sequence[fx.Node], own: bool,
) -> Steps:  # fmt: skip
    """The steps of a stage.

    state, fresh: what comes in, in the state and as new values. It ends with the code's results, then
    `kept`. own: results must not share memory with anything that came in.
    """
    # Nodes, the collectives waited for in front of them, and the collectives started behind them.
    stretches: list[tuple[list[fx.Node], tuple[int, ...], list[int]]] = [(code.gaps[0], (), [])]
    for gap in range(len(code.collectives)):
        stretches[-1][2].append(gap)
        waits = tuple(i for i, use in enumerate(outline.uses) if use == gap)
        early, late = code.ready(gap, outline.uses)
        if outline.overlaps[gap]:
            stretches.append((early, (), []))
        else:
            # No segment before the waits on any rank: all of the gap runs behind them, in its old order.
            late = [n for n in code.gaps[gap + 1] if n in {*early, *late}]
        if waits:
            stretches.append((late, waits, []))
        else:
            assert not late, "code that waits for nothing runs early"
    found: list[Run | RegionStart] = []
    ends: list[End] = [*code.results, *kept]
    values: list[End] = list(state)
    for i, (nodes, waits, starts) in enumerate(stretches):
        new: list[End] = list(fresh) if i == 0 else [code.collectives[w] for w in waits]
        operands = [code.collectives[s].all_input_nodes[0] for s in starts]
        # What no later stretch, start or result needs is dropped from the state, and its memory freed.
        later = {n for rest, _, _ in stretches[i + 1 :] for node in rest for n in node.all_input_nodes}
        later |= {code.collectives[s].all_input_nodes[0] for _, _, more in stretches[i + 1 :] for s in more}
        later |= {n for n in ends if isinstance(n, fx.Node)}
        last = i == len(stretches) - 1
        # Operands of the next starts in front, where `RegionStart.operand` finds them by number.
        carried = [n for n in dict.fromkeys((*values, *new, *nodes)) if isinstance(n, fx.Node) and n in later]
        out: list[End] = ends if last else [*operands, *carried]
        segment = _segment((*key, i), values, new, nodes, out, len(code.results) if last else 0, own)
        found.append(Run(segment, waits))
        found += [_start(code.collectives[s], place) for place, s in enumerate(starts)]
        values = out
    return tuple(found)


def _segment(
    key: tuple[Any, ...], state: Sequence[End], fresh: Sequence[End],
    nodes: Sequence[fx.Node], out: Sequence[End], num_results: int, own: bool,
) -> Segment:  # fmt: skip
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    used = {n for node in nodes for n in node.all_input_nodes} | {n for n in out if isinstance(n, fx.Node)}
    picks = []
    for i, old in enumerate(state):
        if isinstance(old, fx.Node) and old in used and old not in known:
            known[old] = _placeholder(graph, old)
            picks.append(i)
    for value in fresh:
        place = _placeholder(graph, value)
        if isinstance(value, fx.Node):
            known[value] = place
    # So far the graph holds placeholders only: a value handed through is found by its number, inverted.
    given = {node: ~i for i, node in enumerate(graph.nodes)}
    for node in nodes:
        # A tie has done its work when collectives were kept: to the code it is its first operand.
        if node.target is ops.tie.default:
            known[node] = known[node.all_input_nodes[0]]
        else:
            known[node] = graph.node_copy(node, lambda n: known[n])
    fresh_ones: set[fx.Node] = set()
    made: dict[fx.Node, int] = {}
    outs: list[int | None] = []
    for i, end in enumerate(out):
        if end is None:
            outs.append(None)
            continue
        # No gradient on this rank, but on others: zeros, so that all hand out the same results.
        if isinstance(end, TensorForm):
            local = _zeros(graph, end)
        elif i < num_results:
            local = _result(graph, end, known[end], own and not _is_new(end, nodes, fresh_ones))
        else:
            local = known[end]
        outs.append(given[local] if local in given else made.setdefault(local, len(made)))
    graph.output(tuple(made))
    graph.eliminate_dead_code()
    return Segment(key, fx.GraphModule(torch.nn.Module(), graph), picks, outs)


def _placeholder(graph: fx.Graph, like: End) -> fx.Node:
    place = graph.placeholder(f"value_{len(graph.nodes)}")
    if isinstance(like, fx.Node):
        place.meta["val"] = like.meta.get("val")
    return place


def _zeros(graph: fx.Graph, form: TensorForm) -> fx.Node:
    facts: dict[str, Any] = {"dtype": form.dtype, "device": form.device}
    return graph.call_function(aten.zeros.default, (list(form.shape),), facts)


def _result(graph: fx.Graph, node: fx.Node, local: fx.Node, copy: bool) -> fx.Node:
    """A result as the graph around takes it: dense, in the order of its dims."""
    if copy or not node.meta["val"].is_contiguous():
        return graph.call_function(aten.clone.default, (local,), {"memory_format": torch.contiguous_format})
    return local


def _is_new(node: fx.Node, nodes: Sequence[fx.Node], made: set[fx.Node]) -> bool:
    """Whether a result lies in memory that nothing else holds."""
    # One of several results lies in memory of the op that made all of them.
    source = node.args[0] if node.target is operator.getitem else node
    if node in made or source not in nodes or not isinstance(source, fx.Node):
        return False
    made.add(node)
    target = source.target
    return isinstance(target, torch._ops.OpOverload) and all(
        r.alias_info is None for r in target._schema.returns
    )


def _start(node: fx.Node, operand: int) -> RegionStart:
    kind, source = COLLECTIVE_OPS[node.target], node.all_input_nodes[0].meta["val"]
    rest: Any = node.args[1:]
    *flat, index, count, axes, _ = rest
    args = kind.parsed(flat)
    moved = kind.received(tuple(source.shape), GroupMember(index, count), *args) * source.element_size()
    dtype = str(source.dtype).removeprefix("torch.")
    return RegionStart(kind.name, args, tuple(axes), operand, moved, dtype)


def split(graph: fx.Graph, results: Sequence[fx.Node | None], grads: Sequence[fx.Node | None]) -> tuple[
    list[fx.Node], list[fx.Node]
]:  # fmt: skip
    """The nodes that the results need, and those that only the gradients need, both in order."""
    first = _needed(results)
    # What both need the forward makes, and hands over in the state.
    second = _needed(grads) - first
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return [n for n in calls if n in first], [n for n in calls if n in second]


def _needed(ends: Sequence[fx.Node | None]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [n for n in ends if n is not None]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def common(codes: Mapping[int, Code], every: bool) -> Outline | str:
    """The outline that all ranks follow, or why there is none; every: other ranks are still unknown."""
    outlines = {rank: code.outline() for rank, code in codes.items()}
    first_rank, first = next(iter(outlines.items()))
    for rank, outline in outlines.items():
        if outline.calls != first.calls:
            return f"rank {first_rank} uses {_listed(first)}, rank {rank} {_listed(outline)}"
    # The earliest first use of all ranks: who needs a result later has it a little early.
    uses = tuple(map(min, zip(*(o.uses for o in outlines.values()), strict=True)))
    # A gap gets a segment before its waits if any rank has something to do there; others run an empty one.
    rows = [code.overlaps(uses) for code in codes.values()]
    overlaps = tuple(every or any(column) for column in zip(*rows, strict=True))
    return Outline(first.calls, uses, overlaps)


def _listed(outline: Outline) -> str:
    return ", ".join(f"{name} over {' x '.join(axes)}" for name, _, axes in outline.calls) or "no collective"
