"""Which strategies there are for a job: whatever divides evenly, as arrays.

A skeleton is (tp, cp, pp, dp, ep, etp, microbatch): what decides shapes and groups. The rest varies inside
one: chunks a stage, schedule, ZeRO stage, sequence parallelism, placement, recomputation, offload.
Where axes lie is in `axis_order.py`.

    tp           divides heads, key/value heads (or is a multiple of them), and widths; at most `MOST_TP`
    cp           cuts a sample evenly in two halves a rank, with at least `LEAST_TOKENS` left
    pp           at most one rank a layer, none of them empty when layers are dealt out in equal parts
    dp           what is left of the devices; dp * microbatch divides the batch
    ep, etp      ep divides the experts, and ep * etp the ranks of a stage; etp is 1 or tp
    microbatch   powers of two up to `MOST_TOKENS` tokens
    virtual      what the schedule can have; interleaved only where microbatches are a multiple of the stages
    zero         1 and 3; 2 only without accumulation, where cut gradients cost nothing
    schedule     those of `mpmd.SCHEDULES` that are searched, where their closed forms hold

Left out because something here is never worse in the cost model: schedules that say so in their record,
ZeRO-0 (stage 1), selective recomputation (fused attention keeps no scores).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, gcd
from typing import Any, NamedTuple, TypeVar

from hyperparallel.mpmd import SCHEDULES
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.mlp import Moe
from hyperparallel.workload.model import Attention, Model

T = TypeVar("T")
MOST_TP, MOST_CP = 64, 64
LEAST_TOKENS, MOST_TOKENS = 1024, 32768
CHUNKS_A_STAGE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
RECOMPUTED = ("none", "light", "alternate", "full")


class Skeleton(NamedTuple):
    """The sizes that decide shapes and groups."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    microbatch: int


def skeleton_of(strategy: Strategy) -> Skeleton:
    """The sizes of a strategy."""
    return Skeleton(*(getattr(strategy, name) for name in Skeleton._fields))


class Limits(NamedTuple):
    """What of the space is searched. runnable: only what the executor can run today. fixed: fields of
    `Strategy` and the only value that each may have."""

    runnable: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()

    def allowed(self, name: str, values: Sequence[T]) -> list[T]:
        """Those of some values that a field may have."""
        return [value for value in values if self.allows(name, value)]

    def allows(self, name: str, value: Any) -> bool:
        """Whether a field may have a value."""
        return bool(dict(self.fixed).get(name, value) == value)


EVERYTHING = Limits()


def skeletons(job: PlanningJob, limits: Limits = EVERYTHING) -> list[Skeleton]:
    """All of them, in a fixed order."""
    devices, batch = job.devices, job.global_batch
    found = []
    experts, allowed = num_experts(job.model), limits.allowed
    deep = [1] if limits.runnable else stages(job.model, devices)
    for tp in allowed("tp", tensor_sizes(job.model, devices)):
        for cp in allowed("cp", [1] if limits.runnable else context_sizes(job, devices // tp)):
            for pp in allowed("pp", [p for p in deep if devices % (tp * cp * p) == 0]):
                dp = devices // (tp * cp * pp)
                if batch % dp or not limits.allows("dp", dp):
                    continue
                folds = [(1, 1)] if limits.runnable else expert_sizes(experts, tp, tp * cp * dp)
                for ep, etp in folds:
                    if not (limits.allows("ep", ep) and limits.allows("etp", etp)):
                        continue
                    for size in allowed("microbatch", microbatches(batch // dp, job.seq // cp)):
                        found.append(Skeleton(tp, cp, pp, dp, ep, etp, size))
    return found


def tensor_sizes(model: Model, devices: int) -> list[int]:
    """Sizes of tp that cut every layer evenly."""
    return [tp for tp in divisors(devices) if tp <= MOST_TP and _cuts(model, tp)]


def _cuts(model: Model, tp: int) -> bool:
    if not all(_cuts(part.model, tp) for part in model.encoders):
        return False
    for layer, _ in model.kinds:
        for part in (layer.attention, layer.cross):
            if part is None:
                continue
            if part.heads % tp:
                return False
            # More ranks than key/value heads: several hold the same head, if they share it evenly.
            if isinstance(part, Attention) and part.kv_heads % tp and tp % part.kv_heads:
                return False
        mlp = layer.mlp
        width = 0 if mlp is None else (mlp.shared_width if isinstance(mlp, Moe) else mlp.width)
        if width % tp:
            return False
    return model.hidden % tp == 0


def context_sizes(job: PlanningJob, most: int) -> list[int]:
    """Sizes of cp: two equal pieces of a sample for each rank, so that causal attention is balanced."""
    fitting = [c for c in divisors(most) if c <= MOST_CP and job.seq % (2 * c) == 0]
    return [c for c in fitting if c == 1 or job.seq / c >= LEAST_TOKENS] or [1]


def stages(model: Model, devices: int) -> list[int]:
    """Sizes of pp for which no stage is empty."""
    return [p for p in divisors(devices) if even_enough(model.num_layers, p)]


def even_enough(layers: int, parts: int) -> bool:
    """Whether all parts get layers when each takes the same number, the last what is left.

    >>> even_enough(61, 16), even_enough(61, 48)
    (True, False)
    """
    return parts <= layers and ceil(layers / parts) * (parts - 1) < layers


def expert_sizes(experts: int, tp: int, ranks: int) -> list[tuple[int, int]]:
    """(ep, etp) that divide experts and the ranks of a stage."""
    if not experts:
        return [(1, 1)]
    sizes = [ep for ep in divisors(experts) if ranks % ep == 0]
    found = [(ep, 1) for ep in sizes]
    return found + [(ep, tp) for ep in sizes if tp > 1 and ranks % (ep * tp) == 0]


def num_experts(model: Model) -> int:
    """What ep must divide; 0 for a model without experts."""
    found = 0
    for layer, _ in model.kinds:
        if isinstance(layer.mlp, Moe):
            # Layers may have different numbers of experts; ep cuts them all.
            found = gcd(found, layer.mlp.experts)
    return found


def microbatches(samples: int, tokens: int) -> list[int]:
    """Sizes of a microbatch for a rank that has `samples` of `tokens`.

    >>> microbatches(12, 4096)
    [1, 2, 4]
    """
    sizes = [2**k for k in range(samples.bit_length()) if samples % 2**k == 0]
    return [size for size in sizes if size == 1 or size * tokens <= MOST_TOKENS]


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def pipelines(job: PlanningJob, s: Skeleton, limits: Limits = EVERYTHING) -> list[tuple[int, str]]:
    """(chunks a stage, schedule) that these sizes allow."""
    count = job.global_batch // (s.dp * s.microbatch)
    usual = Strategy()  # without a pipeline there is nothing to order
    every = SCHEDULES.values() if s.pp > 1 else [usual.pipeline]
    return [
        (virtual, record.name)
        for record in every
        for virtual in (CHUNKS_A_STAGE if s.pp > 1 else [usual.virtual])
        if record.searched
        and limits.allows("virtual", virtual)
        and limits.allows("schedule", record.name)
        and (virtual == 1 or even_enough(job.model.num_layers, s.pp * virtual))
        # Where the closed forms do not hold, a search by them would be misled.
        and record.serves(s.pp, count, virtual)
    ]


def zeros(job: PlanningJob, s: Skeleton, limits: Limits = EVERYTHING) -> list[int]:
    """ZeRO stages that make a difference."""
    if s.dp * s.cp == 1:
        # Nothing is cut, but a fixed value is kept: its name stands in the plan.
        return [dict(limits.fixed).get("zero", 1)]  # nothing to cut: all mean the same
    return limits.allowed("zero", [1, 2, 3] if job.global_batch == s.dp * s.microbatch else [1, 3])


def norm_cuts(s: Skeleton, limits: Limits = EVERYTHING) -> list[bool]:
    """Whether norms and residuals are cut over tp."""
    if s.tp == 1:
        return [dict(limits.fixed).get("sp", False)]  # one piece either way
    return limits.allowed("sp", [True, False])


def levels(job: PlanningJob, limits: Limits = EVERYTHING) -> list[tuple[str, float]]:
    """(recomputation, share of optimizer states offloaded), each never slower than those after it that have
    as much or more of both."""
    if limits.runnable:
        return [("none", 0.0)]
    shares = (0.0, 1.0) if job.cluster.has_tier("host") else (0.0,)
    kept = limits.allowed("recompute", RECOMPUTED)
    return [(recompute, share) for share in limits.allowed("offload", shares) for recompute in kept]
