"""Seconds of a training step in closed form, for all rows at once.

A product takes

    2 m n k copies * loss^waves * slower / (peak * share * k / (k + half_k)),  at least bytes / memory rate,

loss being the part of the last wave of tiles that stays empty. A pass over a layer takes the larger (softly)
of its device time with what is exposed of its messages and the time the host needs to start its kernels; the
head takes both, for eager software reads the loss.
With t the time of a microbatch in one pipeline stage, m microbatches, p stages and v chunks per stage:

    step = m * t_longest + (p - 1) / v * t + gradients + optimizer + constant

for 1F1B; of other schedules the second term is what their record says (`cold_seconds`, `mpmd/schedules`).
Gradients travel beside the last backward where `overlap` says so. docs/simulator.md states every term.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyperparallel.mpmd import PipelineSchedule, RankSeconds
from hyperparallel.planner.cost.build import UPDATE_BYTES
from hyperparallel.planner.cost.collectives import PRICED_KINDS, GroupArrays, collective_seconds
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.rows import AGAIN, BACKWARD, FORWARD, FRONT, HEAD, Rows
from hyperparallel.planner.cost.work import Array
from hyperparallel.planner.strategy import head_rank, of_schedules, runs_beside_others

SHARPNESS = 4.0
"""Power of the soft maximum of two times that may run beside one another."""

LOCKSTEP = 0.25
"""Share of the host's time that device time does not hide in tensor-parallel groups of eager software: a sum
over ranks ends when the slowest host has started it, and the queue behind it is short."""

GATHERED_BYTES = 2.0
"""Of a parameter that comes back after its part was updated."""

QUANTISE_BYTES = 8.0
"""Moved for each element that is brought into 8 bits: read for its scale, read and written along rows, along
columns; twice as much for 4 bits, which are rotated (random Hadamard) first."""

STATE_BYTES = 12.0
"""Of optimizer states for one parameter; those in host memory come in and go back in every step."""

STEP_SECONDS = 1e-3
"""Once per step: clipping, logging, the host between steps."""


@dataclass
class StepTime:
    """Seconds per step of each row, and what they are made of (they add up)."""

    seconds: Array
    compute: Array
    exposed_tensor: Array
    exposed_experts: Array
    bubble: Array
    exposed_gradients: Array
    optimizer: Array
    communication: Array
    """Seconds of communication, exposed or not."""

    @property
    def exposed(self) -> Array:
        return self.exposed_tensor + self.exposed_experts + self.exposed_gradients


def soft_max(a: Array, b: Array) -> Array:
    """The larger of two, a little more where they are near one another."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    result: Array = top * ((a / top) ** SHARPNESS + (b / top) ** SHARPNESS) ** (1 / SHARPNESS)
    return result


def product_seconds(rows: Rows, constants: Constants) -> Array:
    """Of each product."""
    at = rows.cell_row[rows.product_segment]

    def get(name: str) -> Array:
        column: Array = rows.row[name][at]
        return column

    m, n, k, copies = rows.product_m, rows.product_n, rows.product_k, rows.product_copies
    low = rows.product_low > 0
    attention = rows.product_attention > 0
    peak16 = get("peak16")
    # A format that the device has no units for runs at the 16-bit rate.
    peak = np.where(low & (get("peak") > 0), get("peak"), peak16)
    tiles = np.ceil(m / get("tile_m")) * np.ceil(n / get("tile_n")) * np.ceil(copies)
    units = get("units")
    # Tiles run in waves of as many as there are units, of which the last is part empty.
    loss = np.where(attention, 1.0, (np.ceil(tiles / units) * units / tiles) ** constants.waves)
    # Twice as fast a product needs twice as long a sum to hide the same start.
    half = get("half_k") * peak / peak16
    tuned = get("attention") * (rows.product_attention < 2)
    width = np.minimum(n, k)
    vendor = get("vendor_attention") * 1.5 * width / (width + 64.0)
    fused = np.where(tuned > 0, vendor, get("open_attention") * constants.attention)
    peak = np.where(attention & (tuned > 1), np.clip(get("peak"), peak16, 2 * peak16), peak)
    share = get("gemm") * constants.matmul
    share = share * np.where(attention, fused, k / (k + half))
    seconds = 2.0 * m * n * k * copies * loss * rows.product_slower / (peak * share)
    moved = 2.0 * copies * (m * k + k * n + m * n)
    # Fused attention never writes its scores to memory.
    moved = np.where(attention, 0.0, moved)
    rate = get("memory_bytes_s") * constants.memory
    passes = np.where(peak > 3 * peak16, 2.0, np.where(peak > peak16, 1.0, 0.0))
    scaled = np.where(low, passes * QUANTISE_BYTES * copies * m * k * rows.product_scaled, 0.0)
    result: Array = np.maximum(seconds, moved / rate) + scaled / rate
    return result


@dataclass
class SegmentTimes:
    """Seconds of one layer (or the head) in one pass, per segment: kernels, what is exposed of
    tensor-parallel messages, of tokens sent to experts, and of parameters gathered by ZeRO-3; then how long
    messages and gathers take, exposed or not."""

    compute: Array
    tensor: Array
    dispatch: Array
    fsdp: Array
    travel: Array
    gather: Array


def segment_times(rows: Rows, constants: Constants) -> SegmentTimes:
    """Price every segment."""
    r, cells, at = rows.row, len(rows.cell_row), rows.cell_row
    products = np.bincount(rows.product_segment, product_seconds(rows, constants), cells)
    device: Array = products + (rows.cell_stream + rows.cell_permuted * constants.dispatch) / (
        r["memory_bytes_s"][at] * constants.memory
    )
    launches: Array = rows.cell_launches + np.bincount(rows.message_segment, rows.message_count, cells)
    host = launches * np.where(r["graph"][at] > 0, 1.0, constants.host)
    host = host * r["launch"][at]
    loop = rows.cell_expert_launches * r["launch"][at] * np.where(r["experts"][at] > 0, 1.0, constants.loop)
    # Cubic in the other ranks of a node, at most 7: 7^3 / 49 = 7 times the constant for 8 ranks.
    host = host * (1 + constants.jitter * np.minimum(r["tp"][at] - 1, 7.0) ** 3 / 49)
    sent = rows.message_count * collective_seconds(
        rows.message_kind, rows.message_bytes, rows.message_groups, constants, rows.message_copies
    )
    overlap = (r["overlap"] > 0)[at][rows.message_segment]
    taken = r["taken"][at][rows.message_segment]
    hidden = (rows.message_hidden > 0) & (overlap | (rows.message_hidden > 1))
    experts = rows.message_kind == PRICED_KINDS.index("all_to_all")
    beside = (r["overlap_experts"] > 0) & runs_beside_others(r["pp"], r["virtual"], r["schedule"])
    hidden = hidden | (experts & overlap & beside[at][rows.message_segment])
    shown = sent * np.where(hidden, constants.exposed + taken * (1 - constants.exposed), 1.0)
    tensor = np.bincount(rows.message_segment, shown * ~experts, cells)
    dispatch = np.bincount(rows.message_segment, shown * experts, cells)
    eager = r["graph"][at] == 0
    waited = LOCKSTEP * host * (eager & (r["tp"][at] > 1))
    busy = device + tensor + dispatch
    # Host and device run beside one another, and messages stand in the device's queue.
    compute = soft_max(busy + waited, host) - tensor - dispatch
    head = np.zeros(cells, bool)
    head[rows.segment_cell[rows.segment_pass == HEAD]] = True
    # Reading the loss empties the device's queue: the host starts the next kernels with nothing under way.
    compute = np.where(head & eager, device + host, compute) + loop
    travel = np.bincount(rows.message_segment, sent, cells)
    cell = rows.segment_cell
    compute, tensor, dispatch, travel = compute[cell], tensor[cell], dispatch[cell], travel[cell]
    fsdp, gather = _gathers(rows, compute + tensor + dispatch, constants)
    return SegmentTimes(compute, tensor, dispatch, fsdp, travel, gather)


def _gathers(rows: Rows, busy: Array, constants: Constants) -> tuple[Array, Array]:
    """(exposed, all) seconds per segment of gathering parameters and scattering gradients under ZeRO-3."""
    fsdp, gather = np.zeros(len(busy)), np.zeros(len(busy))
    used = rows.segment_gather.nonzero()[0]
    if len(used):
        at, work = rows.segment_row[used], busy[used]
        groups = rows.groups["dp"].take(at)
        seconds = collective_seconds(np.ones(len(used)), rows.segment_gather[used], groups, constants)
        beside = np.where(rows.row["overlap"][at] > 0, soft_max(work, seconds) - work, seconds)
        gather[used] = seconds
        fsdp[used] = beside + rows.row["taken"][at] * np.maximum(seconds - beside, 0.0)
    return fsdp, gather


def step_seconds(rows: Rows, constants: Constants, times: SegmentTimes | None = None) -> StepTime:
    """Price every row; times: of the same rows, where they are known already."""
    t = times or segment_times(rows, constants)
    r, at, length = rows.row, rows.segment_row, rows.length
    weight = rows.segment_layers * (rows.segment_pass < HEAD)

    def per_row(values: Array, chosen: Array) -> Array:
        return np.asarray(np.bincount(at, values * chosen, length), float)

    is_head = (rows.segment_pass == HEAD) * rows.segment_layers
    layers = per_row(t.compute, weight)
    head = per_row(t.compute + t.tensor, is_head)
    is_front = (rows.segment_pass == FRONT) * rows.segment_layers
    front = per_row(t.compute + t.tensor + t.fsdp, is_front)
    messages = per_row(t.tensor, weight)
    routed = per_row(t.dispatch, weight)
    params_wait = per_row(t.fsdp, weight)
    p, v, m = r["pp"], r["virtual"], r["microbatches"]
    stage = (layers + messages + routed + params_wait) / p
    per_chunk = np.ceil(r["layers"] / (p * v))
    longest = stage * per_chunk * p * v / r["layers"]
    short = np.maximum(per_chunk * p * v - r["layers"], 0.0)
    # The last stage has fewer layers where they do not divide, and the head; so has its rank.
    together = head_rank(p, v, r["schedule"]) == 0
    last = longest - short * stage * p / r["layers"] + head + np.where(together, front, 0.0)
    longest = np.maximum(longest + np.where(p > 1, front, 0.0), last)
    boundary = collective_seconds(np.full(length, 4.0), r["boundary_bytes"], rows.groups["pp"], constants)
    # An activation forward and a gradient backward, for each chunk.
    sends = 2.0 * v * boundary * np.where((r["overlap"] > 0) & (v > 1), constants.exposed, 1.0)
    forward, backward, again = (
        per_row(t.compute + t.tensor + t.dispatch + t.fsdp, weight * (rows.segment_pass == which)) / p
        for which in (FORWARD, BACKWARD, AGAIN)
    )
    more = np.maximum(last - stage, 0.0)  # what the last stage has beyond a mean one
    cold = cold_seconds(p, m, v, r["schedule"], pass_seconds(forward, backward, again, more))
    # The cold pipeline, its messages, and in each microbatch what ranks wait for the longest stage.
    bubble = cold + (p - 1) / v * sends + m * (longest - stage - (head + front) / p)
    gradients, travel_gradients = gradient_seconds(rows, stage, constants)
    optimizer = _optimizer(rows, constants)
    exposed_tensor = m * (messages / p + params_wait / p + sends)
    exposed_experts = m * routed / p
    busy_row = m * (layers + head + front) / p
    parts = (busy_row, exposed_tensor, exposed_experts, bubble, gradients, optimizer)
    seconds = sum(parts[1:], start=parts[0])
    ends = is_head + is_front
    moved = m * (per_row(t.travel, weight + ends) + per_row(t.gather, weight + is_front)) / p
    moved = moved + m * 2.0 * v * boundary
    return StepTime(seconds, *parts, moved + travel_gradients)


def pass_seconds(forward: Array, backward: Array, again: Array, head: Array | float = 0.0) -> RankSeconds:
    """A microbatch's passes on one rank, with the backward cut in halves: of inputs, for which what is
    computed again must be there, and of weights."""
    return RankSeconds(forward, backward / 2 + again, backward / 2, head)


def cold_seconds(p: Array, m: Array, v: Array, schedule: Array, seconds: RankSeconds) -> Array:
    """What a pipeline loses once a step, beyond the microbatches of its fullest rank.

    seconds: of a mean rank, and of the head what the last stage has beyond it.

    >>> one = np.ones(1)
    >>> cold_seconds(4 * one, 8 * one, one, 2 * one, RankSeconds(one, one, one))  # zb-h1
    array([3.])
    """

    def idle(record: PipelineSchedule) -> Array:
        return np.asarray(record.idle(p, m, v, seconds), float)

    return np.where(p > 1, of_schedules(schedule, idle), 0.0)


def gradient_seconds(rows: Rows, stage: Array, constants: Constants) -> tuple[Array, Array]:
    """(exposed, all) seconds of reducing gradients and gathering parameters once per step."""
    r = rows.row
    dense = np.where(r["pp"] > 1, np.maximum(r["params"], 0), r["params"])
    kinds = (PRICED_KINDS.index("reduce_scatter"), PRICED_KINDS.index("all_gather"))
    scatter, gather = (np.full(rows.length, float(kind)) for kind in kinds)
    # Cut states give back parameters in 16 bits; whole ones are an all-reduce, gradients both ways.
    back = np.where(r["zero"] >= 1, GATHERED_BYTES, r["reduced_bytes"])

    def seconds(params: Array, groups: GroupArrays) -> Array:
        there = collective_seconds(scatter, r["reduced_bytes"] * params, groups, constants)
        return there + collective_seconds(gather, back * params, groups, constants)

    everything = seconds(dense, rows.groups["dp"]) + seconds(r["expert_params"], rows.groups["edp"])
    # ZeRO-3 reduces and gathers by layer, which `_gathers` prices.
    everything = np.where(r["zero"] == 3, 0.0, everything)
    window = np.where(r["overlap"] > 0, stage, 0.0)
    # Beside the last backward of a stage; only what is longer than it shows.
    shown = np.maximum(soft_max(everything, window) - window, 0.0)
    shown = shown + r["taken"] * np.maximum(everything - shown, 0.0)
    return np.where(window > 0, shown, everything), everything


def _optimizer(rows: Rows, constants: Constants) -> Array:
    r = rows.row
    ranks = np.where(r["zero"] >= 1, rows.groups["dp"].size, 1.0)
    expert_ranks = np.where(r["zero"] >= 1, rows.groups["edp"].size, 1.0)
    params = r["params"] / ranks + r["expert_params"] / expert_ranks
    seconds = params * UPDATE_BYTES / (r["memory_bytes_s"] * constants.memory) + STEP_SECONDS
    there_and_back = STATE_BYTES * params * r["offload"] * r["host_s_byte"]
    result: Array = seconds + there_and_back
    return result


__all__ = [
    "AGAIN",
    "BACKWARD",
    "FORWARD",
    "SegmentTimes",
    "StepTime",
    "cold_seconds",
    "gradient_seconds",
    "pass_seconds",
    "product_seconds",
    "segment_times",
    "soft_max",
    "step_seconds",
]
