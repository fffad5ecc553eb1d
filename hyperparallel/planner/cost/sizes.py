"""What every part of a layer needs to know of the candidates, bytes by number format, and weight products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperparallel.plan.plan import REDUCE_DTYPES
from hyperparallel.planner.cost.work import Amount, PassWork
from hyperparallel.planner.strategy import DTYPES, Candidates
from hyperparallel.workload.linear import Linear
from hyperparallel.workload.model import Model

SUMMED_BYTES = np.array([{"float32": 4.0}.get(dtype, 2.0) for dtype in REDUCE_DTYPES])
"""Of a gradient that is summed over the data axis."""

KEPT_BYTES = np.array([{"mxfp8": 1.03125, "nvfp4": 0.5625}.get(dtype, 2.0) for dtype in DTYPES])
SENT_BYTES = np.where([dtype == "fp8" for dtype in DTYPES], 1.0, KEPT_BYTES)
"""Of an element gathered over tensor parallelism: in the format of the product that it is for, as Transformer
Engine gathers it (transformer_engine/pytorch/distributed.py). Sums travel in 16 bits."""

NARROW = np.array([1.0 if dtype in ("fp8", "mxfp8", "nvfp4") else 0.0 for dtype in DTYPES])

@dataclass
class CandidateSizes:
    """What every part of a layer needs to know of the candidates."""

    hidden: int
    seq: int
    tokens: Amount
    tp: Amount
    shared: Amount
    """Ranks over which the residual stream is cut: tp with sequence parallelism, else 1."""
    candidates: Candidates
    dropout: bool
    kept_bytes: Amount
    """Of an element of a product's input that is kept for the weight gradient: block-scaled formats keep it
    as they quantised it, with its scales."""
    low: Amount
    """1 where products' operands are brought into a narrower format first."""

    @classmethod
    def of(cls, model: Model, seq: int, c: Candidates) -> CandidateSizes:
        """seq: tokens of one sample (before context parallelism)."""
        dtype = np.asarray(c.dtype, int)
        shared = np.where(c.sp > 0, c.tp, 1.0)
        tokens = c.microbatch * seq / c.cp
        dropout = model.dropout > 0
        return cls(model.hidden, seq, tokens, c.tp, shared, c, dropout, KEPT_BYTES[dtype], NARROW[dtype])


def params_held(linears: Sequence[Linear], tp: Amount) -> Amount:
    """Parameters of these on one rank."""
    return sum((x.params / (1.0 if x.cut == "none" else tp) for x in linears), start=0.0 * np.asarray(tp))


def joined_products(linears: Sequence[Linear]) -> list[tuple[Linear, int]]:
    """Products that share an input are run as one: (the first of them, the sum of their outputs)."""
    found: list[tuple[Linear, int]] = []
    for linear in linears:
        last = found[-1][0] if found else None
        shape = (linear.inputs, linear.cut, linear.copies)
        if last is not None and linear.cut == "out" and (last.inputs, last.cut, last.copies) == shape:
            found[-1] = (last, found[-1][1] + linear.outputs)
            continue
        found.append((linear, linear.outputs))
    return found


def products(linears: Sequence[Linear], work: PassWork, at: CandidateSizes) -> Amount:
    """Add these weight products; returns the bytes of their inputs that are saved."""
    saved: Amount = 0.0
    for linear, outputs in joined_products(linears):
        rows = at.candidates.microbatch if linear.per_sample else at.tokens
        inputs = linear.inputs / (at.tp if linear.cut == "in" else 1.0)
        work.product(rows, outputs / (at.tp if linear.cut == "out" else 1.0), inputs)
        whole = inputs if linear.cut == "in" else linear.inputs / at.shared
        saved = saved + at.kept_bytes * rows * whole
    return saved
