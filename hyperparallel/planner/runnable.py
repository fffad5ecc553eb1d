"""From a strategy to the `Plan` that today's executor runs, as far as it can.

Data and tensor parallelism, ZeRO on the data axis and sequence parallelism become a mesh, an fsdp axis and a
few layouts by the names that transformers gives its decoders. Everything else (pipelines, context and expert
parallelism, recomputation, offload, number formats below 16 bits) is searched, priced and simulated, but not
yet executed: `missing` names it.
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


def missing(strategy: Strategy) -> list[str]:
    """What of a strategy the executor cannot run yet, in words; empty if all of it can.

    >>> missing(Strategy(tp=2, dp=4)), missing(Strategy(pp=2, recompute="full"))
    ([], ['pipeline parallelism', 'recomputation'])
    """
    s = strategy
    found = {
        "pipeline parallelism": s.pp > 1,
        "context parallelism": s.cp > 1,
        "expert parallelism": s.ep > 1 or s.etp > 1,
        "recomputation": s.recompute != "none",
        "offload": s.offload > 0,
        "axes placed apart": s.fill != "packed",
        f"{s.dtype} products": s.dtype not in EXECUTED_DTYPES,
    }
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
    data = "fsdp" if s.dp > 1 else "dp"
    sizes = {data: s.dp, "tp": s.tp} if s.tp > 1 else {data: s.dp}
    mesh = Mesh(tuple(sizes.values()), tuple(sizes))
    cut = [name for name in CUT if not (model.tied and name.startswith("lm_head"))] if s.tp > 1 else []
    inside = {BLOCKS: mesh(data, "tp", None)} if s.sp and s.tp > 1 else {}
    return Plan(
        mesh,
        params={name: mesh("tp", None) for name in cut},
        activations=inside,
        fsdp="fsdp" if s.dp > 1 else None,
        zero=max(s.zero, 1) if s.dp > 1 else 3,
        compute=EXECUTED_DTYPES[s.dtype],
    )


def runnable_dtype(dtype: str) -> bool:
    """Whether the executor computes in this number format."""
    return dtype in EXECUTED_DTYPES
