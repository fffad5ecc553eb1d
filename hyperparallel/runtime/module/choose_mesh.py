"""`plan="auto"`: the mesh with the cheapest program of all that the job's ranks can form.

Every factorisation of the ranks in a data axis (`dp`, parameters whole, or `fsdp`, parameters stored cut) and
a tensor axis `tp` is a candidate without declared layouts. Each is derived as any plan is, with the integer
program choosing every layout, and the one of the fewest seconds by that program's own objective wins, of
those that fit a rank's memory:

    parameters + gradients + two optimizer moments, as stored, + whatever the forward makes

The last is an upper bound: views and what is freed early are counted. Left out: pipelines, and meshes whose
axes differ for different parts of the model. Rank 0 decides, so that all ranks do the same.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperparallel.cluster import Rates
from hyperparallel.errors import LayoutError, PlanError, RunError
from hyperparallel.graph.build import Built, build
from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.plan.wording import bytes_words
from hyperparallel.shard.spec import Spec
from hyperparallel.workload import Value

STATE_COPIES = 4
"""Of each trained parameter: itself, its gradient, and two moments."""

USABLE = 0.9
"""Share of a GPU's memory that a plan may fill; the rest is the context's and the allocator's."""


@dataclass(frozen=True)
class Candidate:
    """One mesh, derived: seconds of a step by the integer program, and bytes of the fullest rank."""

    plan: Plan
    seconds: float
    rank_bytes: float


def meshes(ranks: int) -> Iterator[Plan]:
    """The plans that are tried, simplest first.

    >>> [dict(zip(p.mesh.names, p.mesh.shape)) for p in meshes(2)]
    [{'dp': 2}, {'fsdp': 2}, {'tp': 2}]
    """
    if ranks == 1:
        yield Plan(Mesh((1,), ("dp",)))
        return
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        data = ranks // tp
        if data == 1:
            yield Plan(Mesh((tp,), ("tp",)))
            continue
        for axis in ("dp", "fsdp"):
            sizes, names = ((data, tp), (axis, "tp")) if tp > 1 else ((data,), (axis,))
            yield Plan(Mesh(sizes, names), fsdp="fsdp" if axis == "fsdp" else None)


def candidates(
    model: nn.Module,
    ranks: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rates: Rates | None = None,
    **how: Any,
) -> list[Candidate]:
    """Every mesh derived, cheapest first; those that do not fit the model or batch are left out.

    how: what else `build` is told; left out, all results end whole.
    """
    how = how or {"whole_outputs": True}
    found: list[Candidate] = []
    refused: Exception | None = None
    for plan in meshes(ranks):
        try:
            built = build(model, plan, args, kwargs, rates=rates, **how)
        # A mesh that this model does not fit is no candidate; the last reason is told if none is left.
        except (PlanError, LayoutError) as error:
            refused = error
            continue
        found.append(Candidate(plan, built.decisions.seconds, rank_bytes(built)))
    if not found and refused is not None:
        raise refused
    found.sort(key=lambda one: one.seconds)  # stable: the simpler of equals
    return found


def rank_bytes(built: Built) -> float:
    """An upper bound on the bytes of the fullest rank in a step."""
    decided, values = built.decisions, built.workload.values
    total = 0.0
    for name, value in built.workload.params.items():
        # What is frozen has neither a gradient nor moments.
        copies = STATE_COPIES if name in built.workload.grads else 1
        total += copies * _held(values[value], decided.stored[name])
    for op in built.workload.ops:
        if not op.backward:
            made = zip(op.outputs, decided.operands[op.name][1], strict=True)
            total += sum(_held(values[v], spec) for v, spec in made if v is not None and spec is not None)
    return total


def _held(value: Value, spec: Spec) -> float:
    return value.itemsize * math.prod(spec.layout().largest_shape(value.shape))


def automatic_plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_bytes: float | None = None,
    rates: Rates | None = None,
    **how: Any,
) -> Plan:
    """The cheapest plan for this job's ranks that fits; every rank calls this and gets the same.

    memory_bytes: of one rank; by default `USABLE` of the GPU's, and no bound without one. how: see
    `candidates`. Raises `PlanError` where no mesh fits, with what the smallest needs.
    """
    joined = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if joined else 1
    answer: list[Any] = [None]
    if not joined or dist.get_rank() == 0:
        try:
            # On one rank: solvers of equal ranks may still stop at different answers.
            found = candidates(model, ranks, args, kwargs, rates=rates, **how)
            answer = [first_that_fits(found, memory_bytes or _memory()).to_yaml()]
        except Exception as error:
            answer = [_portable(error)]
    if joined:
        # As text: a plan that is read again is what a user could have written.
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return Plan.from_yaml(answer[0])


def _portable(error: Exception) -> Exception:
    """An error that other ranks can be told: itself where it pickles, else its words.

    Rank 0 must send something: the others wait for its answer. Errors of a capture hold graphs and frames.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"rank 0 found no mesh: {type(error).__name__}: {error}")
    return error


def first_that_fits(found: Sequence[Candidate], memory_bytes: float | None) -> Plan:
    """The first of candidates that fits; `PlanError` where none does."""
    for one in found:
        if memory_bytes is None or one.rank_bytes <= memory_bytes:
            return one.plan
    least = min(found, key=lambda one: one.rank_bytes)
    given = f"auto: the smallest program ({least.plan.mesh}) needs {bytes_words(least.rank_bytes)} a rank"
    allowed = f"at most {bytes_words(memory_bytes or 0.0)}"
    raise PlanError("plan", given, allowed, "a smaller batch, more ranks, or a plan by hand")


def _memory() -> float | None:
    if not torch.cuda.is_available():
        return None
    return USABLE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
