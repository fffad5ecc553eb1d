"""From a strategy to the `Plan` that today's executor runs, as far as it can.

Data and tensor parallelism, ZeRO on the data axis and sequence parallelism become a mesh, an fsdp axis and a
few layouts by the names that transformers gives its decoders; the format of products and of sums goes along,
and the microbatch is `accumulate` of the run (`num_micro_batches`). Everything else (pipelines, context and
expert parallelism, recomputation, offload, number formats below 16 bits) is searched, priced and simulated,
but not yet executed: `missing` names it. So it does what a plan can't choose: whose kernels are used and how
they are started, which a strategy only assumes.
"""

from __future__ import annotations

from hyperparallel.errors import PlanError
from hyperparallel.layout import Mesh
from hyperparallel.plan.plan import Plan
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.mlp import Mlp
from hyperparallel.workload.model import Attention, Model

CUT = ("*.q_proj.weight", "*.up_proj.weight", "lm_head.weight")
"""Weights whose rows tensor parallelism cuts in Llama, Mistral and Qwen; all others follow from them."""

BLOCKS = "model.layers.*"
EXECUTED_DTYPES = {"fp32": None, "bf16": "bfloat16"}


ASSUMED = (
    *("flash", "overlap", "graph", "attention", "experts", "dispatcher", "overlap_experts"),
    *("fused_loss", "reentrant"),
)
"""Fields that say what software a price is for: no choice of a plan, so only the usual value is taken."""


def missing(strategy: Strategy) -> list[str]:
    """What of a strategy the executor cannot run yet, in words; empty if all of it can.

    >>> missing(Strategy(tp=2, dp=4)), missing(Strategy(pp=2, recompute="full", flash=False))
    ([], ['pipeline parallelism', 'recomputation', 'a choice of flash=False'])
    """
    s, usual = strategy, Strategy()
    found = {
        "pipeline parallelism": s.pp > 1 or s.virtual > 1 or s.schedule != usual.schedule,
        "context parallelism": s.cp > 1,
        "expert parallelism": s.ep > 1 or s.etp > 1,
        "recomputation": s.recompute != "none" or bool(s.parts),
        "offload": s.offload > 0,
        f"axes placed {s.fill}": s.fill != "packed",
        f"{s.dtype} products": s.dtype not in EXECUTED_DTYPES,
    }
    for name in ASSUMED:
        found[f"a choice of {name}={getattr(s, name)}"] = getattr(s, name) != getattr(usual, name)
    return [words for words, asked in found.items() if asked]


def known_names(model: Model) -> bool:
    """Whether a model looks like transformers' Llama family, whose weights `CUT` names."""
    layers = [layer for layer, _ in model.kinds]
    plain = all(
        isinstance(layer.attention, Attention)
        and layer.attention.kind in ("gqa", "window")
        and isinstance(layer.mlp, Mlp)
        and layer.mlp.gated
        and layer.cross is None
        for layer in layers
    )
    return plain and bool(model.vocab) and not model.encoders


def to_plan(model: Model, strategy: Strategy) -> Plan:
    """The plan that runs a strategy.

    Raises `PlanError` naming what cannot be run yet, or a model whose weights have other names.
    """
    absent = missing(strategy)
    if absent:
        raise PlanError("--save", strategy.words(), f"a plan without {', '.join(absent)}", "--runnable")
    s = strategy
    if s.tp > 1 and not known_names(model):
        allowed = "a decoder with the names of Llama for tensor parallelism"
        raise PlanError("--save", model.name, allowed, "a plan by hand (--plan FILE)")
    kept_cut = s.dp > 1 and s.zero > 0
    data = "fsdp" if kept_cut else "dp"
    sizes = {data: s.dp, "tp": s.tp} if s.tp > 1 else {data: s.dp}
    mesh = Mesh(tuple(sizes.values()), tuple(sizes))
    cut = [name for name in CUT if not (model.tied and name.startswith("lm_head"))] if s.tp > 1 else []
    inside = {BLOCKS: mesh(data, "tp", None)} if s.sp and s.tp > 1 else {}
    return Plan(
        mesh,
        params={name: mesh("tp", None) for name in cut},
        activations=inside,
        fsdp="fsdp" if kept_cut else None,
        zero=s.zero if kept_cut else 3,
        compute=EXECUTED_DTYPES[s.dtype],
        reduce=s.reduce,
    )


def num_micro_batches(strategy: Strategy, global_batch: int) -> int:
    """How often the program of a strategy runs before a step: `accumulate` of `TrainStep` and `train`.

    >>> num_micro_batches(Strategy(dp=4, microbatch=2), 32)
    4
    """
    return global_batch // (strategy.dp * strategy.microbatch)


def runnable_dtype(dtype: str) -> bool:
    """Whether the executor computes in this number format."""
    return dtype in EXECUTED_DTYPES
