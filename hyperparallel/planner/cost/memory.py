"""Peak memory of the fullest rank, and what it is made of at the peak.

In a pipeline that is the first stage, which holds the most microbatches, or the last, which holds the logits.
With p stages, m microbatches and v chunks a stage they keep, in units of the activations of one microbatch in
their layers (at most m):

    1F1B    min(p, m) and 1    interleaved   min(p, m) + (p - 1) / v and p - (p - 1) / v
    (Korthikanti et al. 2022, section 4.2.3), and of any schedule what its record says (`mpmd/schedules`)

    parameters   2 bytes for each element held. ZeRO-3 keeps only the optimizer's 32-bit shards and
                 casts while it gathers; with a pipeline it gathers once a step and reduces gradients at its
                 end, so both are whole meanwhile, parameters in 8 bits where products are fp8
    gradients    4 bytes (fp32 accumulation), 2 in block-scaled formats, whose recipes accumulate in bf16; cut
                 by ZeRO-2 and 3
    optimizer    12 bytes: a 32-bit copy and two moments; cut by ZeRO-1 and up; the share `offload` is in
                 host memory
    activations  what `layer.py` says is saved, times the microbatches above; between stages also what was
                 sent and the place where its gradient arrives; of encoders those in flight in the first
                 chunk
    working      the layer that is computed again or runs backward with its gradients, or the logits, theirs
                 and the last norm; under ZeRO-3 `GATHERED_LAYERS` whole layers and the 16-bit gradients of
                 one with the 32-bit copy that is reduced
    overhead     context, communication buffers, workspaces: `OVERHEAD_BYTES`

A caching allocator reports less and more than that: not the overhead, but `CACHED_SHARE` of activations and
working memory that it reserved and doesn't use, which it gives back before it fails (`Memory.reserved`).

Left out: uneven experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hyperparallel.planner.cost.rows import Rows
from hyperparallel.planner.cost.work import Array
from hyperparallel.planner.strategy import DTYPES, head_rank, of_schedules

PARAM_BYTES, OPTIMIZER_BYTES = 2.0, 12.0
GATHERED_LAYERS = 2.0
REDUCED_BYTES, REDUCED_AT_ONCE = 6.0, 5e8
"""Of a parameter of the layer that runs backward under ZeRO-3: FSDP2 casts 16-bit gradients to 32 before it
sums them. DeepSpeed sums at most so many at once (`reduce_bucket_size`)."""

OVERHEAD_BYTES = 2.3e9
"""No more than this: published runs (llm-foundry on A100 40 GB) filled their devices beside it."""

CACHED_SHARE = 0.18
"""Reserved beyond what is in use, of memory that comes and goes. Prior 0.2, give or take 0.1: FSDP2 reserved
1.20 times what was active under selective checkpoints, 1.36 under full ones (pytorch/torchtitan pull request
135); chosen by torchtitan's peaks."""

FP8 = DTYPES.index("fp8")


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

    @property
    def reserved(self) -> Array:
        """What a caching allocator reports at its peak."""
        return self.total - self.overhead + CACHED_SHARE * (self.activations + self.working)


def microbatches_held(p: Array, m: Array, v: Array, schedule: Array) -> Array:
    """Microbatches whose activations the first stage holds at once.

    >>> one = np.ones(1)
    >>> microbatches_held(4 * one, 16 * one, 2 * one, 0 * one)  # interleaved, two chunks
    array([5.5])
    """
    return of_schedules(schedule, lambda record: record.held(p, m, v, 0 * p) / v)


def held_last(p: Array, m: Array, v: Array, schedule: Array) -> Array:
    """The same of the rank of the last stage.

    >>> one = np.ones(1)
    >>> held_last(4 * one, 16 * one, 2 * one, 0 * one)
    array([2.5])
    """
    return of_schedules(schedule, lambda record: record.held(p, m, v, record.last_rank(p, v)) / v)


def first_chunk_held(p: Array, m: Array, v: Array, schedule: Array) -> Array:
    """Microbatches whose activations the first stage alone holds at once."""
    return of_schedules(schedule, lambda record: record.held_first(p, m, v))


def memory_of(rows: Rows) -> Memory:
    """Peak memory of every row."""
    r = rows.row
    dp, edp = rows.groups["dp"].size, rows.groups["edp"].size
    p, pipeline = r["pp"], (r["pp"], r["microbatches"], r["virtual"], r["schedule"])
    fully = r["zero"] == 3
    zero = np.where(fully & (p > 1), 1.0, r["zero"])  # see the module: kept whole for a step

    def kept(least: int, bytes_each: float | Array) -> Array:
        cut, expert_cut = np.where(zero >= least, dp, 1.0), np.where(zero >= least, edp, 1.0)
        return bytes_each * (r["params"] / cut + r["expert_params"] / expert_cut)

    parameters = np.where(zero == 3, 0.0, kept(3, PARAM_BYTES))
    # What layers hold, without embedding, head and encoders, which only some stages have.
    inside = np.maximum(r["params"] - r["ends"] - r["front_params"] + r["expert_params"], 0.0)
    parameters = parameters - np.where(fully & (p > 1) & (r["dtype"] == FP8), inside, 0.0)
    # Of the fullest rank; where layers do not divide, the last has fewer.
    layers = np.ceil(r["layers"] / p)
    layer = inside * p / r["layers"]
    reduced = np.where(fully, REDUCED_BYTES * np.minimum(layer, REDUCED_AT_ONCE), 0.0)
    # The layer that computes and the next, gathered beside it; embedding and head for the ends.
    gathered = np.where(zero == 3, GATHERED_LAYERS * 2.0 * layer + 2.0 * r["embedding"], 0.0)
    optimizer = kept(1, OPTIMIZER_BYTES)
    host = optimizer * r["offload"]

    alive = r["saved_bytes"] * layers + np.where(p > 1, 2.0 * r["boundary_bytes"], 0.0)
    first, last = alive * microbatches_held(*pipeline), alive * held_last(*pipeline)
    ahead = r["front_saved"] * first_chunk_held(*pipeline)
    first, last = first + ahead, last + np.where(head_rank(p, r["virtual"], r["schedule"]) == 0, ahead, 0.0)
    backward = r["whole_bytes"] + reduced
    logits = r["logit_bytes"] * r["logits"] + r["norm_bytes"]
    # Whichever of the two ranks is fuller says the peak, activations and working memory of one rank.
    at_end = last + np.maximum(logits, backward) > first + backward
    activations = np.where(at_end, last, first)
    working = np.where(at_end, np.maximum(logits, backward), backward) + gathered
    overhead = np.full(rows.length, OVERHEAD_BYTES)
    gradients = kept(2, r["gradient_bytes"])
    return Memory(parameters, gradients, optimizer - host, activations, working, overhead, host)
