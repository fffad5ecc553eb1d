"""A region as the graph of the whole model holds it: one op, and one more for its backward.

The graph has global shapes; the region's own code has those of one rank. So the code is kept beside the
graph and traced for a rank when that rank's program is written (`Region.program`). Inlining one rank's code
in the joint graph instead would fix that rank's sizes and coordinates for all, and the deciders would have
to reason about ops on pieces; as one op with declared layouts a region is decided like any other op.

Why gradients are right: the backward is the transpose of what all ranks do together. Each rank's own code
is differentiated by autograd, each collective by its transpose; an input that was replicated on an axis had a
copy on each rank, so its gradient is the sum of theirs: it comes out pending, and the program around
decides where to add it up. A result that was replicated on an axis may be read from any one rank, so its
gradient goes in pending: all of it on one rank, or whatever pending sum it already was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperparallel.errors import UserError
from hyperparallel.graph.region import segments
from hyperparallel.graph.region.layouts import transposed
from hyperparallel.graph.region.ops import ops
from hyperparallel.graph.region.rehearsal import Body, RankRehearsal, Scripted, TensorForm, corners
from hyperparallel.graph.region.seat import aside, sit
from hyperparallel.layout import Layout, Mesh

Capture = Callable[..., Any]
"""From a module and its arguments to a `Captured`."""


@dataclass(frozen=True)
class RankCode:
    """One rank's region: the steps of its forward, which end with results and what the backward needs, and
    those of its backward, which end with the gradients of `Region.grad_inputs`."""

    forward: segments.Steps
    backward: segments.Steps


@dataclass
class Region:
    """One call of a region: its code, layouts and forms, the same on all ranks.

    capture: makes the joint graph of a module (handed down, because captures stand above regions). wholes:
    the arguments. parts: what ranks did in rehearsal. digest: equal for calls that do the same on every
    rank. tied: every result of a collective is kept, since not all ranks use all of them.
    """

    name: str
    body: Body
    capture: Capture
    mesh: Mesh
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    wholes: tuple[TensorForm, ...]
    parts: Mapping[int, RankRehearsal]
    digest: str
    tied: bool = False
    _captured: dict[int, Any] = field(default_factory=dict)
    _codes: dict[int, RankCode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = self.parts[self.mesh.ranks[0]].results
        # A result may need a gradient on some ranks only; the program around has to be one on all.
        taken = range(len(self.results))
        self.grad_results = tuple(
            i for i in taken if any(part.results[i].requires_grad for part in self.parts.values())
        )
        for i in self.grad_results:
            pending = [how for _, how in self.out_layouts[i].partial if how != "sum"]
            if pending:
                raise UserError(
                    f"gradient of result {i} of {self.name}", f"pending {pending[0]}", "a pending sum",
                    "a detached result, which has no gradient",
                )  # fmt: skip
        self.outlines = self._outlines()
        found = [self._capture(rank).input_grads for rank in self._traced()]
        names = self._inputs()
        self.grad_inputs = tuple(i for i, n in enumerate(names) if any(n in grads for grads in found))

    def forms(self, rank: int) -> list[TensorForm]:
        """This rank's pieces of the arguments."""
        return local_forms(self.wholes, self.in_layouts, rank)

    def _traced(self) -> tuple[int, ...]:
        """The ranks that decide together what the program around looks like."""
        return self.mesh.ranks if self.mesh.size <= 8 else corners(self.mesh, 8)

    def _inputs(self) -> list[str]:
        return list(self._capture(self.mesh.ranks[0]).inputs)

    def _outlines(self) -> tuple[segments.Outline, segments.Outline]:
        # Of ranks not traced yet nothing is known: they may have something to do in every gap.
        every = len(self._traced()) < self.mesh.size
        # First without ties: a tie makes every rank keep collectives whose results it does not use.
        for tied in (False, True):
            self.tied = tied
            self._captured.clear()
            codes = {rank: self._stages(rank) for rank in self._traced()}
            found = [segments.common({r: c[k] for r, c in codes.items()}, every) for k in range(2)]
            forward, backward = found
            if isinstance(forward, segments.Outline) and isinstance(backward, segments.Outline):
                return forward, backward
        where, why = ("forward", forward) if isinstance(forward, str) else ("backward", backward)
        raise UserError(
            f"collectives of {self.name}, {where}", str(why), "the same collectives on every rank",
            "code in which every rank's results depend on every collective",
        )  # fmt: skip

    def _capture(self, rank: int) -> Any:
        if rank not in self._captured:
            with _tracer_kept():
                self._captured[rank] = aside(lambda: self._trace(rank))
        return self._captured[rank]

    def _trace(self, rank: int) -> Any:
        # A rank that did not rehearse takes the first one's script: such meshes are cut evenly.
        part = self.parts.get(rank) or self.parts[self.mesh.ranks[0]]
        train = any(form.requires_grad for form in part.results)
        with FakeTensorMode():
            given = tuple(form.fake() for form in self.forms(rank))
        module = _Body(self, lambda: Scripted(self.name, self.mesh, rank, part.script))
        roots = [str(i) for i in self.grad_results if part.results[i].requires_grad]
        return self.capture(module, given, train=train, grad_outputs=roots, strict=False, shorten=False)

    def _stages(self, rank: int) -> tuple[segments.Code, segments.Code]:
        captured = self._capture(rank)
        node_of = {node.name: node for node in captured.graph.nodes}
        outputs = [node_of[captured.outputs[str(i)]] for i in range(len(self.results))]
        grads = [node_of.get(captured.input_grads.get(name, "")) for name in captured.inputs]
        first, second = segments.split(captured.graph, outputs, grads)
        return segments.Code(first, outputs), segments.Code(second, grads)

    def program(self, rank: int) -> RankCode:
        """The code of one rank, traced at the first call."""
        if rank not in self._codes:
            self._codes[rank] = self._cut(rank)
        return self._codes[rank]

    def _cut(self, rank: int) -> RankCode:
        forward, backward = self._stages(rank)
        for code, outline in zip((forward, backward), self.outlines, strict=True):
            mine = code.outline()
            # To use a result later than outlined is no harm: the rank waits where all do.
            if mine.calls != outline.calls or any(map(int.__lt__, mine.uses, outline.uses)):
                raise UserError(
                    f"collectives of {self.name}", f"others on rank {rank}", "the same ones on every rank"
                )
        captured = self._capture(rank)
        node_of = {node.name: node for node in captured.graph.nodes}
        inputs = [node_of[name] for name in captured.inputs.values()]
        tangents = [node_of.get(captured.tangents.get(str(i), "")) for i in self.grad_results]
        forms = self.forms(rank)
        gradients: list[segments.End] = [backward.results[i] or forms[i] for i in self.grad_inputs]
        backward.results = gradients
        wanted = {n for gap in backward.gaps for node in gap for n in node.all_input_nodes}
        wanted |= {c.all_input_nodes[0] for c in backward.collectives}
        wanted |= {n for n in gradients if isinstance(n, fx.Node)}
        # All that the forward has when it ends; what the backward wants of it is saved in the state.
        known = [*inputs, *forward.collectives, *(n for gap in forward.gaps for n in gap)]
        saved = [n for n in known if n in wanted]
        key = (self.name, self.digest)
        # The key makes segments of different ranks equal: they stand in the same place of the same region.
        first = segments.steps(forward, self.outlines[0], (*key, "f"), (), inputs, saved, False)
        ends: list[Any] = [*forward.results, *saved]
        second = segments.steps(backward, self.outlines[1], (*key, "b"), ends, tangents, (), True)
        return RankCode(first, second)


def local_forms(wholes: Sequence[TensorForm], layouts: Sequence[Layout], rank: int) -> list[TensorForm]:
    """What `rank` holds of tensors laid out so."""
    return [
        replace(form, shape=layout.local_shape(form.shape, rank))
        for layout, form in zip(layouts, wholes, strict=True)
    ]


@contextlib.contextmanager
def _tracer_kept() -> Iterator[None]:
    """Give a trace under way its notes back, the very dict: a trace inside it leaves a copy (torch 2.13)."""
    mine, held = fx_traceback.current_meta, dict(fx_traceback.current_meta)
    try:
        yield
    finally:
        # The dict itself: hooks of the outer trace hold on to it.
        mine.clear()
        mine.update(held)
        fx_traceback.current_meta = mine


class _Body(nn.Module):
    """The region's code as a module of one rank."""

    def __init__(self, region: Region, make: Callable[[], Scripted]) -> None:
        super().__init__()
        self.region, self.make = [region], make  # in a list, so that copies of the module share it

    def __deepcopy__(self, memo: dict[int, Any]) -> _Body:
        return self

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        region, place = self.region[0], self.make()
        results = list(sit(place, region.body, *tensors))
        if region.tied and place.made:
            # To a result with a gradient, so that transposes of unused collectives run in its backward too.
            tie = next(iter(region.grad_results), 0)
            results[tie] = ops.tie(results[tie], place.made)
        return tuple(results)


class RegionForward:
    """The op of a region in a joint graph: from its tensors to its results and the token of its backward."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.__name__ = f"region_{region.name}"

    @property
    def layouts(self) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts that it takes and gives, whatever the plan says."""
        return self.region.in_layouts, (*self.region.out_layouts, self.region.mesh())

    def __call__(self, *args: Any) -> Any:  # noqa: ARG002 -- a node's target is a callable of its operands
        raise AssertionError(f"{self} is a part of a sharded program")

    def __str__(self) -> str:
        return f"local_region.{self.region.name}.{self.region.digest}"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash(str(self))


class RegionBackward(RegionForward):
    """The op of its backward: from the token and the results' gradients to those of its tensors."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.__name__ = f"region_{region.name}_backward"

    @property
    def layouts(self) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        region = self.region
        taken = (transposed(region.out_layouts[i]) for i in region.grad_results)
        return (region.mesh(), *taken), tuple(transposed(region.in_layouts[i]) for i in region.grad_inputs)

    def __str__(self) -> str:
        return f"{super().__str__()}.backward"
