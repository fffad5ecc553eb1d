"""Regions while a model is captured: each call becomes one op of the joint graph.

`tracing` surrounds a capture; a region that is called under it rehearses its code on all ranks of the
mesh, and stands in the graph as `hyperparallel::region` with its number in the capture's list. When the
graph is there, `lift_regions` puts the regions themselves in the place of the numbers. The list is a context
variable because the call comes from inside the user's forward.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from hyperparallel.errors import LayoutError, UserError
from hyperparallel.graph.region.layouts import DimEntry, joined_shape, resolve, uneven
from hyperparallel.graph.region.ops import LIBRARY, ops
from hyperparallel.graph.region.record import Capture, Region, RegionBackward, RegionForward, local_forms
from hyperparallel.graph.region.rehearsal import MOST_THREADS, Body, TensorForm, digest, rehearse
from hyperparallel.layout import Mesh

LIBRARY.define("region(Tensor[] tensors, int number) -> Tensor[]")
LIBRARY.define("region_backward(Tensor token, Tensor[] grads, int number) -> Tensor[]")


@dataclass
class Tracing:
    """The regions of one capture.

    mesh: the plan's, None where there is no plan. capture: traces the code of one rank of a region. running:
    what surrounds the user's code on a type of device. calls: what each call was made with, and its region.
    The tracer runs the forward more than once; a call in the place of an equal one is that one, and is not
    rehearsed again.
    """

    mesh: Mesh | None
    capture: Capture
    running: Callable[[str], contextlib.AbstractContextManager[Any]]
    regions: list[Region] = field(default_factory=list)
    calls: list[tuple[Any, Region]] = field(default_factory=list)
    _position: int = 0

    def passing(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """What surrounds one run of the forward."""
        self._position = 0
        return self.running(device_type)

    def call(self, facts: Any, make: Callable[[], Region]) -> Region:
        """The region of the next call, made with `facts`."""
        place, self._position = self._position, self._position + 1
        if place < len(self.calls) and self.calls[place][0] == facts:
            return self.calls[place][1]
        found = make()
        # Another call than in the run before: what followed it then is void.
        self.calls[place:] = [(facts, found)]
        return found

    def number(self, found: Region) -> int:
        if found not in self.regions:
            self.regions.append(found)
        return self.regions.index(found)


_TRACING: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar(
    "hyperparallel_tracing", default=None
)


@contextlib.contextmanager
def tracing(
    mesh: Mesh | None, capture: Capture, running: Callable[[str], contextlib.AbstractContextManager[Any]]
) -> Iterator[Tracing]:
    """Collect the regions that are called under it."""
    found = Tracing(mesh, capture, running)
    before = _TRACING.set(found)
    try:
        yield found
    finally:
        _TRACING.reset(before)


def active() -> Tracing | None:
    """The capture under way, if there is one."""
    return _TRACING.get()


def traced(
    under: Tracing, mesh: Mesh, name: str, body: Body, tensors: Sequence[Tensor],
    in_layouts: Sequence[DimEntry], out_layouts: Sequence[DimEntry], facts: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A call of a region inside a capture; facts: what its code depends on beside the tensors."""

    def surrounded(*local: Tensor) -> tuple[Tensor, ...]:
        with under.running(tensors[0].device.type):
            return body(*local)

    # Shapes alone are compared: fake tensors of two runs are never the same objects.
    region = under.call(
        (facts, [TensorForm.of(x) for x in tensors], torch.is_grad_enabled()),
        lambda: _region(under, mesh, name, surrounded, tensors, in_layouts, out_layouts),
    )
    results: tuple[Tensor, ...] = _Call.apply(under.number(region), region, *tensors)  # type: ignore[no-untyped-call]
    # The token is for the backward; the user's code gets results.
    return results[:-1]


def _region(
    under: Tracing, mesh: Mesh, name: str, body: Body, tensors: Sequence[Tensor],
    in_layouts: Sequence[DimEntry], out_layouts: Sequence[DimEntry],
) -> Region:  # fmt: skip
    ins = tuple(
        resolve(entry, mesh, x.dim(), f"argument {i} of {name}")
        for i, (entry, x) in enumerate(zip(in_layouts, tensors, strict=True))
    )
    for i, layout in enumerate(ins):
        if layout.partial:
            raise LayoutError(
                f"layout of argument {i} of {name}", str(layout), "a layout with nothing pending"
            )
    left = uneven(ins, [x.shape for x in tensors])
    # Only corners rehearse then, and take their own sizes for those of all ranks.
    if left and mesh.size > MOST_THREADS:
        allowed = f"sizes that the axes divide, on a mesh of more than {MOST_THREADS} ranks"
        raise UserError(f"arguments of {name}", left, allowed)
    grad = torch.is_grad_enabled()
    given = map(TensorForm.of, tensors)
    wholes = tuple(replace(form, requires_grad=form.requires_grad and grad) for form in given)

    def forms(rank: int) -> list[TensorForm]:
        return local_forms(wholes, ins, rank)

    try:
        parts = rehearse(name, body, mesh, forms, grad)
    except UserError:
        raise
    except Exception as error:
        # Without uneven pieces it is the code's own mistake, and told as it is.
        if not left:
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"arguments of {name}", f"{left} ({type(error).__name__}: {first})",
            "sizes that the axes divide, or code that copes with pieces of different sizes",
        ) from error  # fmt: skip
    kinds = {rank: [(len(r.shape), r.dtype) for r in part.results] for rank, part in parts.items()}
    first_rank = mesh.ranks[0]
    for rank, kind in kinds.items():
        if kind != kinds[first_rank]:
            raise UserError(
                f"results of {name}",
                f"{kind} on rank {rank}",
                f"{kinds[first_rank]}, as on rank {first_rank}",
            )
    outs, shapes = [], []
    for i, entry in enumerate(out_layouts):
        what = f"result {i} of {name}"
        outs.append(resolve(entry, mesh, len(parts[first_rank].results[i].shape), what))
        local = {rank: part.results[i].shape for rank, part in parts.items()}
        shapes.append(joined_shape(outs[-1], local, what))
    key = digest(name, parts, ins, tuple(outs), wholes)
    # Equal calls (the layers of a stack) are one region: traced once, and equal nodes for repeated blocks.
    for known in under.regions:
        if known.digest == key:
            return known
    return Region(name, body, under.capture, mesh, ins, tuple(outs), tuple(shapes), wholes, parts, key)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, region: Region, *tensors: Tensor) -> tuple[Tensor, ...]:
        *results, token = ops.region(list(tensors), number)
        ctx.number, ctx.region, ctx.count = number, region, len(tensors)
        ctx.save_for_backward(token)
        # They have no gradient on any rank, and the backward op takes none for them.
        fixed = [x for i, x in enumerate(results) if i not in region.grad_results]
        ctx.mark_non_differentiable(token, *fixed)
        return (*results, token)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        region = ctx.region
        (token,) = ctx.saved_tensors
        given = [grads[i] for i in region.grad_results]
        made = dict(zip(region.grad_inputs, ops.region_backward(token, given, ctx.number), strict=True))
        return None, None, *(made.get(i) for i in range(ctx.count))


def _regions() -> list[Region]:
    found = active()
    assert found is not None, "region ops stand in graphs under capture only"
    return found.regions


def _region_fake(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    region, like = _regions()[number], tensors[0]
    results = [
        like.new_empty(shape, dtype=form.dtype, device=form.device)
        for shape, form in zip(region.out_shapes, region.results, strict=True)
    ]
    return [*results, like.new_empty((), dtype=torch.int64)]


def _backward_fake(
    token: Tensor,
    grads: Sequence[Tensor],  # noqa: ARG001 -- the op's schema
    number: int,
) -> list[Tensor]:
    region = _regions()[number]
    forms = [region.wholes[i] for i in region.grad_inputs]
    return [token.new_empty(form.shape, dtype=form.dtype) for form in forms]


torch.library.register_fake("hyperparallel::region", _region_fake, lib=LIBRARY)
torch.library.register_fake("hyperparallel::region_backward", _backward_fake, lib=LIBRARY)


def lift_regions(graph: fx.Graph, regions: Sequence[Region]) -> None:
    """Put each region in the place of its number, in place."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ops.region.default:
            tensors, number = node.args
            node.target = RegionForward(regions[number])
            node.args = tuple(tensors)
        elif node.target is ops.region_backward.default:
            token, grads, number = node.args
            node.target = RegionBackward(regions[number])
            node.args = (token, *grads)
