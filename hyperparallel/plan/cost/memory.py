"""Peak memory of the fullest rank, and what it is made of at the peak.

The fullest rank of a pipeline is the first: it holds the most microbatches. With p stages, m microbatches and
v chunks a stage it keeps, in units of the activations of one microbatch in its layers,

    1F1B, zero-bubble   min(p, m)         interleaved   min(p, m) + (p - 1) / v,  at most m
    GPipe               m                 (Korthikanti et al. 2022, section 4.2.3)

    parameters   2 bytes for each element held (`param_bytes`); ZeRO-3 cuts them over the data axis and holds
                 `GATHERED_LAYERS` whole layers in 16 bits. With a pipeline it gathers them once a step and
                 reduces gradients at its end, so both are whole meanwhile
    gradients    4 bytes (fp32 accumulation), 2 in block-scaled formats, whose recipes accumulate in bf16; cut
                 by ZeRO-2 and 3
    optimizer    12 bytes: a 32-bit copy and two moments; cut by ZeRO-1 and up; the share `offload` is in
                 host memory
    activations  what `layer.py` says is saved, times the microbatches above
    working      the layer that is computed again or runs backward with its gradients, or the logits and
                 theirs on the last stage where that is also the first
    overhead     context, communication buffers, workspaces: `OVERHEAD_BYTES`

Left out: fragmentation beyond the overhead, uneven experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hyperparallel.plan.cost.rows import Rows
from hyperparallel.plan.cost.work import Array
from hyperparallel.plan.strategy import SCHEDULES

PARAM_BYTES, OPTIMIZER_BYTES = 2.0, 12.0
GATHERED_LAYERS = 2.0
OVERHEAD_BYTES = 2.5e9
GPIPE = SCHEDULES.index("gpipe")


@dataclass
class Memory:
    """Bytes on the fullest rank of each row; the parts add up to `total`. `host` is kept in host memory."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    working: Array
    overhead: Array
    host: Array

    @property
    def total(self) -> Array:
        parts = [getattr(self, f.name) for f in fields(self) if f.name != "host"]
        return np.asarray(sum(parts[1:], start=parts[0]))


def microbatches_held(p: Array, m: Array, v: Array, schedule: Array) -> Array:
    """Microbatches whose activations the first stage holds at once.

    >>> one = np.ones(1)
    >>> microbatches_held(4 * one, 16 * one, 2 * one, 0 * one)  # interleaved, two chunks
    array([5.5])
    """
    one_f_one_b = np.minimum(p, m) + np.where(v > 1, (p - 1) / v, 0.0)
    return np.where(schedule == GPIPE, m, np.minimum(one_f_one_b, m))


def memory_of(rows: Rows) -> Memory:
    """Peak memory of every row."""
    r = rows.row
    dp, edp = rows.groups["dp"].size, rows.groups["edp"].size
    p = r["pp"]
    zero = np.where((r["zero"] == 3) & (p > 1), 1.0, r["zero"])  # see the module: kept whole for a step

    def kept(least: int, bytes_each: float | Array) -> Array:
        cut, expert_cut = np.where(zero >= least, dp, 1.0), np.where(zero >= least, edp, 1.0)
        return bytes_each * (r["params"] / cut + r["expert_params"] / expert_cut)

    parameters = kept(3, PARAM_BYTES)
    per_layer = (r["params"] - r["embedding"] + r["expert_params"]) * p / r["layers"]
    gathered = np.where(
        zero == 3, GATHERED_LAYERS * 2.0 * np.maximum(per_layer, 0.0) + 2.0 * r["embedding"], 0.0
    )
    optimizer = kept(1, OPTIMIZER_BYTES)
    host = optimizer * r["offload"]
    held = microbatches_held(p, r["microbatches"], r["virtual"], r["schedule"])
    activations = r["saved_bytes"] * np.ceil(r["layers"] / p) * held
    logits = np.where(p == 1, r["logit_bytes"] * r["logits"], 0.0)
    working = np.maximum(r["whole_bytes"], logits) + gathered
    overhead = np.full(rows.length, OVERHEAD_BYTES)
    return Memory(
        parameters, kept(2, r["gradient_bytes"]), optimizer - host, activations, working, overhead, host
    )
