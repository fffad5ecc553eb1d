"""Run a region's code as every rank on tensors without memory, before anything is traced.

All ranks run at once, as threads that meet at every collective. That shows, cheaply: what each rank
returns, the sizes of every member's operand (a rank alone cannot know those of others), and whether the
ranks call the same collectives. It is also where misuse is refused: random numbers, whose values would
depend on the rank, and tensors that are no arguments of the region, which would have no layout.

On a mesh of more than `MOST_THREADS` ranks only the corners of the mesh rehearse, each taking its own
sizes for everybody's; cuts must then be even.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hyperparallel.errors import UserError
from hyperparallel.graph.joint.constants import Constant
from hyperparallel.graph.region.ops import call_op
from hyperparallel.graph.region.seat import Meeting, MetSeat, Seat, meet, sit
from hyperparallel.layout import Mesh

MOST_THREADS = 64
Body = Callable[..., tuple[Tensor, ...]]
"""The code of a region: from its tensors to its results."""


@dataclass(frozen=True)
class TensorForm:
    """What is known of a tensor before it has a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> TensorForm:
        return cls(tuple(x.shape), x.dtype, x.device, x.requires_grad)

    def fake(self) -> Tensor:
        """A tensor like this; to be called under a fake mode."""
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


@dataclass
class RankRehearsal:
    """What one rank did: what it returned, the operands' shapes of each collective, and every op."""

    results: tuple[TensorForm, ...] = ()
    script: list[list[tuple[int, ...]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


def rehearse(
    name: str, body: Body, mesh: Mesh, forms: Callable[[int], Sequence[TensorForm]], grad: bool
) -> dict[int, RankRehearsal]:
    """By rank, what `body` does as that rank on tensors of the given forms (of this rank's pieces)."""
    ranks = rehearsed(mesh)
    parts = {rank: RankRehearsal() for rank in ranks}

    def perform(rank: int) -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.set_grad_enabled(grad), mode:
            given = [form.fake() for form in forms(rank)]
            with _Recorder(name, mode, given, parts[rank].log):
                results = body(*given)
        parts[rank].results = tuple(TensorForm.of(x) for x in results)

    if len(ranks) == mesh.size:

        def met(rank: int, meeting: Meeting) -> MetSeat:
            return _Rehearsing(name, mesh, rank, meeting, parts[rank].script)

        meet(mesh, met, perform)
        return parts
    # One after another: a corner has nobody to meet and takes its own sizes for the others'.
    for rank in ranks:
        sit(_Assuming(name, mesh, rank, parts[rank].script), perform, rank)
    first = [len(op) for op in parts[ranks[0]].script]
    for rank in ranks[1:]:
        if [len(op) for op in parts[rank].script] != first:
            raise UserError(
                f"collectives of {name}", f"others on rank {rank} than on rank {ranks[0]}",
                "the same collectives in the same order on every rank",
            )  # fmt: skip
    return parts


def rehearsed(mesh: Mesh) -> tuple[int, ...]:
    """The ranks that rehearse."""
    return mesh.ranks if mesh.size <= MOST_THREADS else corners(mesh)


def corners(mesh: Mesh, most: int = 16) -> tuple[int, ...]:
    """The first and last ranks along every axis, at most so many, in mesh order."""
    ends = [tuple(dict.fromkeys((0, n - 1))) for n in mesh.shape]
    found = itertools.islice(itertools.product(*ends), most)
    # First and last along each axis: where code that branches on `axis_index` most often differs.
    at = {mesh.rank_at(**dict(zip(mesh.names, place, strict=True))) for place in found}
    return tuple(rank for rank in mesh.ranks if rank in at)


@dataclass
class _Rehearsing(MetSeat):
    script: list[list[tuple[int, ...]]] = field(default_factory=list)

    def shapes(self, call: tuple[Any, ...], axes: tuple[str, ...], x: Tensor) -> list[tuple[int, ...]]:
        found = super().shapes(call, axes, x)
        self.script.append(found)
        return found

    def run(self, name: str, x: Tensor, axes: tuple[str, ...], *args: Any) -> Tensor:
        self.number += 1
        return call_op(name, x, args, self.member(axes), axes, self.number)


@dataclass
class _Assuming(Seat):
    script: list[list[tuple[int, ...]]] = field(default_factory=list)

    def shapes(self, call: tuple[Any, ...], axes: tuple[str, ...], x: Tensor) -> list[tuple[int, ...]]:
        # Uneven operands on so large a mesh were refused before (`tracing.py`).
        found = [tuple(x.shape)] * len(self.members(axes))
        self.script.append(found)
        return found

    run = _Rehearsing.run


@dataclass
class Scripted(Seat):
    """A rank whose collectives become words of the graph being traced, with the shapes of a rehearsal."""

    script: Sequence[list[tuple[int, ...]]] = ()
    made: list[Tensor] = field(default_factory=list)
    """What its collectives returned."""

    def shapes(self, call: tuple[Any, ...], axes: tuple[str, ...], x: Tensor) -> list[tuple[int, ...]]:
        # The sizes that all members had in rehearsal: one rank is traced alone, and cannot ask.
        return self.script[self.number]

    def run(self, name: str, x: Tensor, axes: tuple[str, ...], *args: Any) -> Tensor:
        self.number += 1
        self.made.append(call_op(name, x, args, self.member(axes), axes, self.number))
        return self.made[-1]


class _Recorder(TorchDispatchMode):
    """Writes every op down, and refuses those that a region must not have."""

    def __init__(self, name: str, mode: FakeTensorMode, given: Iterable[Tensor], log: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.mode, self.log = name, mode, log
        self.kept = list(given)  # so that no id is given to another tensor
        self.numbers = {id(x): i for i, x in enumerate(self.kept)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UserError(
                f"random op in {self.name}", str(func), "code without random numbers",
                "a random tensor made outside the region and passed to it",
            )  # fmt: skip
        leaves, _ = pytree.tree_flatten((args, kwargs or {}))
        said = [self._said(x) if isinstance(x, Tensor) else repr(x) for x in leaves]
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_flatten(result)[0]:
            if isinstance(x, Tensor):
                # An op may return its operand (in place): it keeps the number that it has.
                self.numbers.setdefault(id(x), len(self.numbers))
                self.kept.append(x)
        self.log.append(f"{func}({', '.join(said)})")
        return result

    def _said(self, x: Tensor) -> str:
        if id(x) in self.numbers:
            return f"%{self.numbers[id(x)]}"
        # A tensor made inside is the mode's own; a plain one is a constant of the code, known by its content.
        mine = isinstance(x, FakeTensor) and x.fake_mode is self.mode
        if not mine and (type(x) is not Tensor or isinstance(x, nn.Parameter)):
            raise UserError(
                f"tensor in {self.name}", f"one of shape {list(x.shape)} that is no argument",
                "tensors that are passed to the region", "it as one more argument with a layout of its own",
            )  # fmt: skip
        self.kept.append(x)
        self.numbers[id(x)] = len(self.numbers)
        return f"{tuple(x.shape)} {x.dtype}" if mine else str(Constant(x))


def digest(name: str, parts: Mapping[int, RankRehearsal], *facts: Any) -> str:
    """A text that two regions share exactly when every rank does the same in both."""
    logs = [(rank, part.log, part.results, part.script) for rank, part in parts.items()]
    return hashlib.sha256(repr((name, logs, facts)).encode()).hexdigest()[:16]
