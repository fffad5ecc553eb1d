"""Programs for the parts of a model: one capture, cut by modules, each part under its own plan.

    module, batch -> joint graph -> split -> per part: workload, rules, decisions, rank programs
                                         -> per crossing value: an edge between two layouts

A part is built by what builds a whole model (`build.decided`); only its inputs and results are partly
another part's. Their layouts are free: each part's solver takes what costs its own program least, and the
edge takes a value from the one to the other (`edge.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from hyperparallel.errors import PlanError, Words
from hyperparallel.graph.build import Built, captured_model, decided, loss_of
from hyperparallel.graph.capture.capture import Captured
from hyperparallel.graph.capture.extract import extract
from hyperparallel.graph.edge import Edge
from hyperparallel.graph.passes.split import PartCut, split_parts
from hyperparallel.graph.region.record import RegionForward
from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.workload import Workload


@dataclass(frozen=True)
class Part:
    """Some modules of a model, and the plan under which they run on the ranks of its mesh.

    modules: patterns of module names; a pattern names a module with all below it, and a star is one part
    of a dotted name.

    >>> import hyperparallel as hp
    >>> Part(["model.layers.0", "model.layers.1"], hp.Plan(hp.Layout((2,), ("tp",), ranks=(0, 1)))).modules
    ['model.layers.0', 'model.layers.1']
    """

    modules: Sequence[str]
    plan: Plan

    def __post_init__(self) -> None:
        if isinstance(self.modules, str) or not all(isinstance(name, str) for name in self.modules):
            instead = f"[{str(self.modules)!r}]"
            raise PlanError("modules", self.modules, "a list of patterns of names", instead)
        if not self.modules:
            raise PlanError("modules", self.modules, "one or more patterns, or no part at all")
        if not isinstance(self.plan, Plan):
            raise PlanError("plan", self.plan, "a Plan, with the mesh of this part", "Plan(mesh, ...)")


@dataclass(frozen=True)
class BuiltParts:
    """A model in parts: what all ranks share.

    captured: the joint graph of the whole model. edges: activations in the order of the parts that read them,
    gradients in the reverse order. reports: take the loss to the meshes that do not make it. draws: the
    random ops of each part, in the order of the forward.
    """

    captured: Captured
    built: tuple[Built, ...]
    edges: tuple[Edge, ...]
    reports: tuple[Edge, ...]
    draws: tuple[tuple[fx.Node, ...], ...]

    @cached_property
    def workload(self) -> Workload:
        """What the whole model computes."""
        return extract(self.captured)

    @property
    def rules(self) -> dict[str, Rule]:
        """The rule of every op of the whole model: an op has the same name in its part."""
        return {name: rule for each in self.built for name, rule in each.rules.items()}

    @property
    def loss_part(self) -> int:
        """The part that makes the loss."""
        return next(i for i, built in enumerate(self.built) if self.loss in built.workload.outputs)

    @property
    def loss(self) -> str:
        """The path of the loss in the model's result."""
        return next(iter(self.captured.outputs))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of some part, ascending."""
        return tuple(sorted({rank for built in self.built for rank in built.decisions.mesh.ranks}))

    def into(self, part: int, *, backward: bool) -> list[Edge]:
        """The edges that bring a part its activations, or its gradients."""
        return [e for e in self.edges if e.target == part and e.backward == backward]


def build_parts(
    module: nn.Module,
    parts: Sequence[Part],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: str = "",
    train: bool = True,
    micro_batches: int = 1,
    later: bool = False,
    device: torch.device | None = None,
) -> BuiltParts:
    """Capture a model once, cut it, and decide each part under its plan.

    parts: in the order in which the forward goes through them. loss, train, micro_batches, later, device: see
    `build`. Raises `PlanError` for parts that cannot be cut so, and what `build` raises.
    """
    _check_alike(parts)
    captured = captured_model(module, parts[0].plan, args, kwargs, loss=loss, train=train, device=device)
    cut = split_parts(captured, [part.modules for part in parts], lenient=later)
    _check_regions(cut, parts)
    plans = [part.plan for part in parts]
    if later:  # it need not use every parameter that the first program did
        plans = [_fewer(plan, each.params) for plan, each in zip(plans, cut.parts, strict=True)]
    built = tuple(
        decided(each, plan, edges=frozenset(each.input_grads), micro_batches=micro_batches, later=later)
        for each, plan in zip(cut.parts, plans, strict=True)
    )
    reports = _reports(loss or loss_of(captured), built)
    return BuiltParts(captured, built, _edges(cut, built), reports, cut.draws)


def _fewer(plan: Plan, names: Collection[str]) -> Plan:
    return replace(plan, params={name: layout for name, layout in plan.params.items() if name in names})


def _check_alike(parts: Sequence[Part]) -> None:
    if not parts:
        raise PlanError("parts", parts, "one or more parts")
    given = [part.plan.compute for part in parts]
    if len(set(given)) > 1:
        raise PlanError("parts, compute", given, "one value for all parts: they are captured as one")


def _check_regions(cut: PartCut, parts: Sequence[Part]) -> None:
    """Capture, which is one for all parts, laid the regions out on the mesh of the first."""
    for number, (each, part) in enumerate(zip(cut.parts, parts, strict=True)):
        for node in each.graph.nodes:
            if isinstance(node.target, RegionForward) and node.target.region.mesh != part.plan.mesh:
                given = Words(f"the region {node.target.region.name} in part {number}, on {part.plan.mesh}")
                allowed = f"regions in parts on the mesh of the first part, {node.target.region.mesh}"
                raise PlanError("parts", given, allowed)


def _edges(cut: PartCut, built: Sequence[Built]) -> tuple[Edge, ...]:
    found = []
    for c in cut.crossings:
        value = built[c.source].workload.values[c.value]
        src = built[c.source].decisions.outputs[c.value].layout()
        dst = built[c.target].decisions.sources[c.value].layout()
        is_lent = c.value in built[c.source].workload.params.values()
        reduce = built[c.source].decisions.plan.reduce
        found.append(Edge(c.name, value, c.source, c.target, c.backward, src, dst, is_lent, reduce))
    # All ranks go through the edges in one order: activations with the parts, then gradients back.
    return tuple(sorted(found, key=lambda e: (e.backward, -e.target if e.backward else e.target)))


def _reports(loss: str, built: Sequence[Built]) -> tuple[Edge, ...]:
    source = next(i for i, each in enumerate(built) if loss in each.workload.outputs)
    work, decisions = built[source].workload, built[source].decisions
    value, src = work.values[work.outputs[loss]], decisions.outputs[work.outputs[loss]].layout()
    told, found = set(src.mesh.ranks), []
    for target, each in enumerate(built):
        # Each rank is told once: meshes may share ranks.
        missing = tuple(rank for rank in each.decisions.mesh.ranks if rank not in told)
        if missing:
            told.update(missing)
            dst = Mesh((len(missing),), ("told",), missing)()
            reduce = decisions.plan.reduce
            found.append(Edge(loss, value, source, target, False, src, dst, reduce=reduce))
    return tuple(found)
