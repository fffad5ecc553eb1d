"""From a model, a cluster, a batch and strategies to rows that can be priced."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.planner.cost.encoder import front_of
from hyperparallel.planner.cost.layer import layer_work
from hyperparallel.planner.cost.rows import (
    AGAIN,
    BACKWARD,
    FORWARD,
    FRONT,
    HEAD,
    LayerPass,
    Rows,
    candidate_rows,
)
from hyperparallel.planner.cost.shapes import distinct, spread
from hyperparallel.planner.cost.sizes import KEPT_BYTES, SUMMED_BYTES
from hyperparallel.planner.cost.work import Amount, Array, PassWork
from hyperparallel.planner.strategy import Candidates, head_rank
from hyperparallel.workload.model import Model

UPDATE_BYTES = 30.0
"""Read and written by Adam for one parameter: a 4-byte gradient, 4-byte master, two 4-byte moments each read
and written, a 2-byte copy written."""

LOSS_BYTES, UNFUSED_LOSS_BYTES = 24.0, 20.0
"""For one logit, forward and backward: a fused loss reads it twice and writes it once, apart from the
products; else torch's own (logarithmic softmax and its gradient, in the logits' 16 bits)."""


LOGIT_BYTES, UNFUSED_LOGIT_BYTES, CUT_LOGIT_BYTES = 6.0, 12.0, 16.0
"""Alive for one logit: 16 and 32 bits; else the logarithmic softmax and the gradients of loss and logits in
32 bits; over a cut vocabulary a fourth, their exponentials (`torch.distributed.tensor.parallel.loss`)."""

NORM_BYTES, UNFUSED_NORM_BYTES = 4.0, 8.0
"""Of an element of the last norm, alive beside the logits: its input and output (Korthikanti et al. 2022,
section 4.3); without a fused norm also the input in 32 bits."""


ALIGNED, LOADS = 8, 0.2
"""Elements that one load instruction of a matrix product brings, and the share of its time that loads take
(chosen on vTrain's unpadded vocabulary, cut over 1 to 8 ranks: odd rows reach 80 TFLOP/s on an A100)."""


TP_COPIES = 3.0
"""Whole-width tensors alive while a tensor-parallel layer runs backward: its gathered input, the gradient
before it is scattered, and the same of the layer's other half."""


def rows_of(model: Model, cluster: Cluster, seq: int, global_batch: Amount, candidates: Candidates) -> Rows:
    """One row per candidate. seq: tokens of a sample. global_batch: samples in a step, over all ranks.

    The microbatches of a rank are global_batch / (dp * microbatch), at least 1.
    """
    c = candidates
    first, shape = distinct(c)
    shapes = c.take(first)

    def each(value: Amount) -> Array:
        """Of every candidate, from that of every shape."""
        return spread(value, len(first))[shape]

    segments: list[LayerPass] = []
    params: Amount = 0.0
    expert_params: Amount = 0.0
    saved: Amount = 0.0
    whole_bytes: Amount = 0.0
    microbatches = np.maximum(np.asarray(global_batch) / (c.dp * c.microbatch), 1.0)
    # Pipelines keep what they gathered for the whole step: their microbatches are small and many.
    gathered = (c.zero == 3) / np.where(c.pp > 1, microbatches, 1.0)
    reduced = SUMMED_BYTES[np.asarray(c.reduce, int)]
    extra = tuple((layer, model.mtp) for layer in (model.mtp_layers if model.mtp else ()))
    for layer, count in (*model.kinds, *extra):
        work = layer_work(layer, model, seq, shapes)
        whole = 2.0 * each(work.params + work.expert_params) * gathered
        segments.append(LayerPass(work.forward, FORWARD, count, whole))
        segments.append(LayerPass(work.backward, BACKWARD, count, (1.0 + reduced / 2.0) * whole))
        segments.append(LayerPass(work.again, AGAIN, count))
        # Over all layers here, by stage in `row` below.
        params = params + work.params * count
        expert_params = expert_params + work.expert_params * count
        saved = saved + work.saved_bytes * count
        whole_bytes = np.maximum(whole_bytes, work.whole_bytes)
    segments.append(LayerPass(_head(model, seq, shapes), HEAD, 1.0 + model.mtp))
    if model.mtp:
        segments.append(LayerPass(_joiner(model, seq, shapes), HEAD, float(model.mtp)))
    front = front_of(model, shapes)
    for ahead, times, num_bytes in front.passes:
        segments.append(LayerPass(ahead, FRONT, times, each(num_bytes) * gathered))
    whole_bytes = np.maximum(whole_bytes, front.whole_bytes)
    layers = float(model.num_layers + model.mtp * len(extra))
    tokens = c.microbatch * seq / c.cp
    head = model.head_params / c.tp
    ends = model.embedding_params / c.tp + head * _meet(c.pp, c.virtual, c.schedule)
    norm = np.where(c.fused_loss > 0, NORM_BYTES, UNFUSED_NORM_BYTES)
    row: dict[str, Amount] = {
        "layers": layers,
        "microbatches": microbatches,
        "params": each(params) / c.pp + ends + each(front.params),
        "front_params": each(front.params),
        "front_saved": each(front.saved_bytes),
        "embedding": float(model.embedding_params + model.head_params) / c.tp,
        "ends": ends,
        "head_params": head,
        "expert_params": each(expert_params) / c.pp,
        "boundary_bytes": 2.0 * tokens * model.hidden / c.tp,
        "saved_bytes": each(saved) / layers,
        "whole_bytes": 2.0 * each(whole_bytes)
        + np.where(c.tp > 1, TP_COPIES * 2.0 * tokens * model.hidden, 0.0),
        "logits": tokens * model.vocab / c.tp,
        "offload": c.offload,
        # Block-scaled recipes accumulate gradients in 16 bits.
        "gradient_bytes": np.where(KEPT_BYTES[c.dtype.astype(int)] < 2.0, 2.0, 4.0),
        "logit_bytes": np.where(
            c.fused_loss > 0, LOGIT_BYTES, np.where(c.tp > 1, CUT_LOGIT_BYTES, UNFUSED_LOGIT_BYTES)
        ),
        "norm_bytes": tokens * model.hidden * (norm / np.where(c.sp > 0, c.tp, 1.0) + 2.0 * (c.tp > 1)),
        "dtype": c.dtype,
        "reduced_bytes": reduced,
        "tokens": np.asarray(global_batch) * float(seq),
    }
    return candidate_rows(segments, c, cluster, row, first, shape)


def _meet(pp: Array, virtual: Array, schedule: Array) -> Array:
    """1 where the first rank has the last stage too, and so the head besides the embedding."""
    return np.where(head_rank(pp, virtual, schedule) == 0, 1.0, 0.0)


def with_pipeline(row: Mapping[str, Array], virtual: Array, schedule: Array) -> dict[str, Array]:
    """The columns of rows whose chunks a stage and schedules are others: what the fullest rank holds of
    embedding and head follows."""
    before, after = _meet(row["pp"], row["virtual"], row["schedule"]), _meet(row["pp"], virtual, schedule)
    # The first rank gains or loses the head where the last stage moves to it or away.
    more = row["head_params"] * (after - before)
    held = {"params": row["params"] + more, "ends": row["ends"] + more}
    return {**row, **held, "virtual": virtual, "schedule": schedule}


def _joiner(model: Model, seq: int, c: Candidates) -> PassWork:
    """What joins the hidden vectors with the next token's embedding before an extra prediction: 2 h -> h."""
    work = PassWork()
    tokens = c.microbatch * seq / c.cp / c.tp
    for m, n, k in ((tokens, model.hidden, 2 * model.hidden), (tokens, 2 * model.hidden, model.hidden),
                    (2 * model.hidden, model.hidden, tokens)):  # fmt: skip
        work.product(m, n, k)
    return work


def _unaligned(width: Array) -> Array:
    """How much slower products are whose rows have `width` 2-byte elements, against vectors of 16 bytes.

    Rows that begin at any multiple of a < 8 elements are loaded in vectors of a, with 8 / a times as many
    instructions: a vocabulary of 50,257 takes 2.4 times as long as one of 50,304.
    """
    vector = np.gcd(width, ALIGNED)
    result: Array = 1.0 + LOADS * (ALIGNED / vector - 1.0)
    return result


def _head(model: Model, seq: int, c: Candidates) -> PassWork:
    """Logits and loss, forward and backward, with the vocabulary cut over tp."""
    work = PassWork()
    tokens = c.microbatch * seq / c.cp
    if model.vocab:
        part = model.vocab / c.tp
        slower = _unaligned(np.floor(part).astype(int))
        work.product(tokens, part, model.hidden, low=False, slower=slower)
        work.product(tokens, model.hidden, part, low=False, slower=slower)
        work.product(part, model.hidden, tokens, low=False, slower=slower)
        work.stream(np.where(c.fused_loss > 0, LOSS_BYTES, UNFUSED_LOSS_BYTES) * tokens * part, 12.0)
        work.stream(20.0 * tokens * model.hidden, 8.0)
    return work
