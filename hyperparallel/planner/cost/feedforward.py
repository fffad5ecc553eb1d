"""Feed-forward parts as work: activation functions, mixtures of experts, what moves tokens to them."""

from __future__ import annotations

import numpy as np

from hyperparallel.planner.cost.sizes import CandidateSizes, joined_products
from hyperparallel.planner.cost.work import Amount, LayerCollective, PassWork, Product
from hyperparallel.workload.mlp import Mlp, Moe

EXPERT_BIAS = 28.0
"""Moved for one element of the experts' output where it has a bias: product with the probability in 32 bits
(4 written), sum (6 read, 4 written), concatenation (4, 4), cast (4, 2); Megatron-Core's experts do so."""

CLAMP_BYTES = 16.0
"""Moved for one element between experts' products where it is clamped: both halves read and written (8), put
together again (8), before the function that is one kernel (Megatron-Core, weighted_bias_quick_geglu_impl)."""


def pointwise_bytes(gated: bool) -> float:
    """Read and written for one element between the products of a feed-forward layer."""
    return 6.0 if gated else 4.0


def between_bytes(moe: Moe) -> float:
    """The same between the products of experts."""
    return pointwise_bytes(moe.gated) + (CLAMP_BYTES if moe.clamped else 0.0)


def activation(mlp: Mlp, work: PassWork, at: CandidateSizes) -> tuple[Amount, Amount]:
    """The pointwise function between the two products of a dense part: elements, and bytes that are saved."""
    elements = at.tokens * mlp.width / at.tp
    work.stream(pointwise_bytes(mlp.gated) * elements)
    return elements, elements * (4.0 if mlp.gated else 2.0)


def experts(moe: Moe, work: PassWork, at: CandidateSizes) -> tuple[Amount, Amount]:
    """Dispatch, grouped products, combine; returns saved bytes and elements between the products."""
    c = at.candidates
    routed = at.tokens / at.shared * moe.topk  # token copies that leave this rank, and with balance arrive
    size = moe.latent or at.hidden
    local = moe.experts / c.ep
    fused = (c.experts > 0) * 1.0
    rows = routed * c.etp / local
    saved: Amount = 0.0
    for linear, outputs in joined_products(moe.routed(at.hidden)):
        inputs = linear.inputs / (c.etp if linear.cut == "in" else 1.0)
        first = linear.cut == "out"
        work.products.append(
            Product(rows, outputs / (c.etp if first else 1.0), inputs, local, grouped=True,
                    scaled=1.0 if first else 1.0 - fused, scaled_back=1.0 - fused if first else 1.0)
        )  # fmt: skip
        work.expert_launches = work.expert_launches + local * (1.0 + at.low) * (1.0 - fused) + fused
        saved = saved + at.kept_bytes * rows * local * inputs
    elements = routed * moe.width
    work.stream(between_bytes(moe) * elements * (1.0 - fused), 0.0)
    sorts = np.where(c.dispatcher > 0, 1.0, 2.0)
    moved = routed * size * 2.0
    work.permuted_bytes = work.permuted_bytes + 4.0 * sorts * moved  # there and back, read and written
    work.expert_launches = work.expert_launches + 8.0
    if moe.bias:  # each expert's is weighed by the router's probability and added to its own rows
        work.stream(EXPERT_BIAS * routed * size * (1.0 - fused), 0.0)
        work.expert_launches = work.expert_launches + 3.0 * local * (1.0 - fused)
    copies = np.where(c.dispatcher > 0, moe.topk, 1.0)
    for _ in ("out", "back"):
        work.messages.append(LayerCollective("all_to_all", "ep", moved, copies=copies))
        work.messages.append(LayerCollective("all_gather", "etp", routed * c.etp * size * 2.0))
    return saved + elements * (4.0 if moe.gated else 2.0) + routed * size * 2.0, elements
