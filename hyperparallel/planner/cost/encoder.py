"""What stands in front of a model's layers for images or sound, as work of the first pipeline stage.

A sample has one input of `EncoderPart.tokens` patches for each encoder. Its layers are cut like the model's
(heads over tp, patches over cp), recomputed alike, and run where the embedding is; the stem makes patches
into vectors and has no gradient of its input, the projector works on merged tokens. Left out: several images
in a sample, images of different sizes, encoders that are frozen or spread over ranks of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperparallel.planner.cost.layer import layer_work
from hyperparallel.planner.cost.sizes import SUMMED_BYTES
from hyperparallel.planner.cost.work import Amount, PassWork
from hyperparallel.planner.strategy import Candidates
from hyperparallel.workload.linear import Linear
from hyperparallel.workload.model import EncoderPart, Model


@dataclass
class Front:
    """passes: work, how many times for each microbatch, bytes that ZeRO-3 gathers or scatters for it. params:
    elements held by a rank of the first stage; saved_bytes: kept of a microbatch; whole_bytes: as in
    `LayerWork`."""

    passes: list[tuple[PassWork, int, Amount]]
    params: Amount
    saved_bytes: Amount
    whole_bytes: Amount


def front_of(model: Model, c: Candidates) -> Front:
    """All encoders of a model."""
    front = Front([], 0.0, 0.0, 0.0)
    summed = SUMMED_BYTES[np.asarray(c.reduce, int)]
    for part in model.encoders:
        encoder = part.model
        for layer, count in encoder.kinds:
            work = layer_work(layer, encoder, part.tokens, c)
            params = np.asarray(work.params)
            front.passes += [
                (work.forward, count, 2.0 * params),
                (work.backward, count, (2.0 + summed) * params),
                (work.again, count, 0.0),
            ]
            front.params = front.params + work.params * count
            front.saved_bytes = front.saved_bytes + work.saved_bytes * count
            front.whole_bytes = np.maximum(front.whole_bytes, work.whole_bytes)
        _ends(part, c, front)
    return front


def _ends(part: EncoderPart, c: Candidates, front: Front) -> None:
    """Stem and projector."""
    encoder, work = part.model, PassWork()
    patches = c.microbatch * part.tokens / c.cp
    saved = _products(encoder.stem, patches, c, work, inputs_too=False)
    saved = saved + _products(part.projector, patches / part.merge, c, work, inputs_too=True)
    work.stream(20.0 * patches * encoder.hidden, 4.0)
    front.passes.append((work, 1, 0.0))
    front.saved_bytes = front.saved_bytes + saved
    ends = encoder.embedding_params + encoder.head_params + part.norm_params
    projector = sum((x.params / (c.tp if x.cut != "none" else 1.0) for x in part.projector), start=0.0 * c.tp)
    front.params = front.params + ends + projector


def _products(
    linears: Sequence[Linear], rows: Amount, c: Candidates, work: PassWork, inputs_too: bool
) -> Amount:
    """Forward and gradients of some matrices; returns the bytes of their inputs."""
    saved: Amount = 0.0
    for x in linears:
        inputs = x.inputs / (c.tp if x.cut == "in" else 1.0)
        outputs = x.outputs / (c.tp if x.cut == "out" else 1.0)
        work.product(rows, outputs, inputs)
        work.product(outputs, inputs, rows)
        if inputs_too:
            work.product(rows, inputs, outputs)
        saved = saved + 2.0 * rows * inputs
    return saved
