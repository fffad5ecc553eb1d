"""Compute between communication, compiled by Inductor: one compile per distinct region.

A stage is cut where a collective starts or is waited for (and at random ops, whose numbers must stay
those of eager torch). Each stretch of compute becomes one node that calls a `Stretch`; regions with equal
code share one compiled function, so the layers of a model compile once. A region is compiled when it
first runs, for the sizes and strides it is called with; there is no fallback to eager.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hyperparallel.graph.passes.phases import Stage
from hyperparallel.graph.region.segments import Segment

SMALLEST = 3
"""A region with fewer ops is not worth a compiled call."""

_compiled: dict[Any, Any] = {}


class Stretch:
    """A function made of nodes; calls with equal code, sizes and strides share one compilation."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.code = module, module.code
        self.function: Any = None
        self.__name__ = "stretch"  # fx names nodes after it

    def __call__(self, *arguments: Tensor) -> Any:
        if self.function is None:
            self.function = self._compile(arguments)
        return self.function(*arguments)

    def _compile(self, arguments: Sequence[Tensor]) -> Any:
        # Strides too: the compiled kernels have them built in.
        key = (self.code, tuple((x.shape, x.stride(), x.dtype, x.device) for x in arguments))
        if key not in _compiled:
            # Not through torch.compile: there is no Python left to guard (checked on torch 2.13).
            _compiled[key] = torch._inductor.standalone_compile(
                self.module, list(arguments), dynamic_shapes="from_example_inputs"
            )
        return _compiled[key]


def num_compiled() -> int:
    """How many different regions this process has compiled."""
    return len(_compiled)


def fuse_regions(stage: Stage) -> list[fx.Node]:
    """The stage's nodes with every stretch of compute replaced by one call and its results."""
    kept = set(stage.outputs)
    order: list[fx.Node] = []
    for stretch in _stretches(stage.nodes):
        if isinstance(stretch[0].target, Segment):
            stretch[0].target = _compiled_segment(stretch[0].target)
        if len(stretch) < SMALLEST or not _fusible(stretch[0]):
            order.extend(stretch)
            continue
        inside = set(stretch)
        inputs = list(dict.fromkeys(n for x in stretch for n in x.all_input_nodes if n not in inside))
        results = [x for x in stretch if x in kept or any(u not in inside for u in x.users)]
        if not results:
            continue
        order.extend(_call(stretch, inputs, results))
    return order


def _call(stretch: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
    """Turn a stretch into one call node; the result nodes themselves become its items."""
    inner = fx.Graph()
    copies = {x: inner.placeholder(f"x{i}") for i, x in enumerate(inputs)}
    for node in stretch:
        copies[node] = inner.node_copy(node, lambda n: copies[n])
    inner.output(tuple(copies[x] for x in results))
    region = Stretch(fx.GraphModule(torch.nn.Module(), inner))
    owner = stretch[0].graph
    with owner.inserting_before(stretch[0]):
        call = owner.call_function(region, tuple(inputs))
    call.meta.update(stretch[0].meta)
    for i, node in enumerate(results):
        node.target, node.args, node.kwargs = operator.getitem, (call, i), {}
    return [call, *results]


def _compiled_segment(segment: Segment) -> Segment:
    """A stretch of the user's per-rank code sent through Inductor, if it is worth it and nothing but ops."""
    nodes = segment.module.graph.nodes
    work = [n for n in nodes if n.op == "call_function"]
    values = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
    plain = all(map(_fusible, work)) and all(isinstance(x, Tensor) for x in values)
    return segment.through(Stretch(segment.module)) if plain and len(work) >= SMALLEST else segment


def _stretches(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    found: list[list[fx.Node]] = []
    for node in nodes:
        if found and _fusible(node) and _fusible(found[-1][0]):
            found[-1].append(node)
        else:
            found.append([node])
    return found


def _fusible(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _fusible(source)  # a region takes tensors, not tuples of them
    if not isinstance(target, torch._ops.OpOverload):  # collectives are none
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags
