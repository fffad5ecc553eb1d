"""One decoder layer as work: its matrix products, streamed bytes, messages and saved activations.

With T = microbatch * seq / cp tokens on a rank and 2-byte elements:

    products   forward (T, outputs, inputs) of each weight; backward the same volume twice
    core       scores and weighted values; fused, or explicit with the softmax over T * seq * heads scores
    streams    norms 4 h, residual and dropout 6 h, activations, rotary, permutations, each a few bytes
               for every element read and written; backward 1.6 times as many
    messages   tensor parallel: two sums of T h a pass (with `sp` a gather and a scatter each, and one
               more gather in the backward), context parallel: keys and values gathered, or the states of
               recurrent layers; experts: tokens out and back, topk / tp of them
    saved      the input of every product (once where several share it), queries, keys, values, inputs of
               norms and activations, dropout masks; explicit attention also 5 bytes for each score
               (Korthikanti et al. 2022, arXiv:2205.05198, whose totals this reproduces). "alternate" keeps
               the layer's input, the core's output, outputs of every other product that backward needs, and
               half of the experts' (torchtitan's selective checkpoints of single operators, compiled)

Experts are balanced. Left out: padding of uneven heads, token dropping.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyperparallel.planner.cost.feedforward import activation, between_bytes, experts, pointwise_bytes
from hyperparallel.planner.cost.sizes import SENT_BYTES, CandidateSizes, params_held, products
from hyperparallel.planner.cost.work import Amount, LayerCollective, LayerWork, PassWork, Product
from hyperparallel.planner.strategy import PARTS, RECOMPUTE, Candidates
from hyperparallel.workload.layer import NORM_VECTORS
from hyperparallel.workload.linear import Linear
from hyperparallel.workload.mlp import Mlp, Moe
from hyperparallel.workload.model import Attention, Layer, Model, StateSpace

BACKWARD_STREAM, SCORES_BACKWARD = 1.6, 1.25
"""Bytes moved backward for one forward, by pointwise work and by softmax and dropout on explicit scores
(forward 4 and 5 for a score: read, write, mask; backward 6 and 5)."""

SOFTMAX_BATCHES = 4
"""Megatron's fused softmax serves heads * samples on a rank that are a multiple of this
(megatron/core/fusions/fused_softmax.py, `is_kernel_available`)."""

TORCH_SOFTMAX_BYTES, TORCH_SOFTMAX_KERNELS = 33.0, 4.0
"""What torch adds to that of explicit scores: into 32 bits (6), scale (8), mask (9), softmax (8), back (6),
where the one fused kernel moves 4."""

SCAN_SLOWER = 8.0
"""Chunked scans against fused attention, FLOP for FLOP: they are as fast at 2,048 tokens (arXiv:2405.21060,
figure 10) with about an eighth of the work."""

CP_PIECES = 2.0
"""Of a sample on each context-parallel rank, one from either end, so that causal attention is balanced."""

SELECTIVE, ALTERNATE, FULL = (RECOMPUTE.index(x) for x in ("selective", "alternate", "full"))


def layer_work(layer: Layer, model: Model, seq: int, candidates: Candidates) -> LayerWork:
    """The work of one microbatch in one layer on one rank, for all candidates at once.

    seq: tokens of one sample (before context parallelism).
    """
    c = candidates
    at = CandidateSizes.of(model, seq, c)
    shared = at.shared
    forward, core, scan, end = PassWork(), PassWork(), PassWork(), PassWork()
    parts = [part for part in (layer.attention, layer.cross, layer.mlp) if part is not None]
    saved: Amount = 0.0
    params, expert_params = 0.0 * c.tp, 0.0 * c.tp
    norm_bytes = 4.0 * layer.norms * at.tokens * at.hidden / shared
    forward.stream(norm_bytes, layer.norms)
    pieces = {part: PassWork() for part in PARTS}
    given: dict[str, Amount] = dict.fromkeys(PARTS, 0.0)
    pieces["norms"].stream(norm_bytes, layer.norms)
    given["norms"] = at.kept_bytes * layer.norms * at.tokens * at.hidden / shared
    saved = saved + 2.0 * layer.norms * at.tokens * at.hidden / shared
    core_saved: Amount = 0.0
    alternate: Amount = 2.0 * at.tokens * at.hidden / shared
    counted = 0
    # Routed experts are summed by the exchange that brings their tokens back. Parts that read one input are
    # gathered for and summed at once, behind the last of them.
    summed = [part for part in parts if not (isinstance(part, Moe) and not part.shared_width)]
    summed = summed[-1:] if layer.parallel else summed
    modulation = layer.modulation(at.hidden)
    saved = saved + products(modulation, forward, at)
    params = params + params_held(modulation, c.tp)
    for part in parts:
        place = forward
        if isinstance(part, Moe):
            mixture = pieces["experts"]
            routed, activated = experts(part, mixture, at)
            pieces["activations"].stream(between_bytes(part) * activated)
            saved, alternate = saved + routed, alternate + routed / 2
            expert_params = expert_params + sum(x.params for x in part.routed(at.hidden)) / (c.ep * c.etp)
            dense = [*part.router(at.hidden), *part.shared(at.hidden)]
            beside = products(dense, mixture, at)
            saved = saved + beside
            given["activations"] = at.kept_bytes * activated
            given["experts"] = routed + beside
            place = forward = _joined(forward, mixture)
        else:
            dense = list(part.linears(at.hidden))
            place = end if part is parts[-1] else forward
            saved = saved + products(dense[:-1], forward, at) + products(dense[-1:], place, at)
            if isinstance(part, Mlp):
                activated, kept = activation(part, forward, at)
                pieces["activations"].stream(pointwise_bytes(part.gated) * activated)
                given["activations"] = at.kept_bytes * activated
                saved = saved + kept
            else:
                given["latent"] = given["latent"] + _latent(dense, pieces["latent"], at)
                kept, scores = _core(part, core if isinstance(part, Attention) else scan, at)
                saved, core_saved = saved + kept, core_saved + scores
                alternate = alternate + _core_output(part, at)
                params = params + part.vector_params
        alternate = alternate + _every_other(dense, counted, at)
        counted += len(dense)
        if any(part is one for one in summed):
            _tensor_parallel(place, at)
        residual = 6.0 + (1.0 if at.dropout else 0.0)
        place.stream(residual * at.tokens * at.hidden / shared)
        saved = saved + (at.tokens * at.hidden / shared if at.dropout else 0.0)
        params = params + params_held(dense, c.tp)
    params = params + layer.norms * at.hidden * NORM_VECTORS[model.norm]
    alone, dropped = _alone(pieces, given, c)
    again = _joined(
        # Selective: the core alone. Alternate: half of the products. Full: all but the last product, unless
        # reentrant.
        core.scaled((c.recompute == SELECTIVE) | (c.recompute == FULL)),
        scan.scaled(c.recompute == FULL),
        forward.scaled(np.where(c.recompute == FULL, 1.0, np.where(c.recompute == ALTERNATE, 0.5, 0.0))),
        end.scaled(np.where(c.recompute == FULL, c.reentrant, np.where(c.recompute == ALTERNATE, 0.5, 0.0))),
        *alone,
    )
    whole = saved + core_saved
    saved = saved - dropped
    # The estimate counts outputs, what is kept else counts inputs: never more than without recomputation.
    saved = np.where(c.recompute == ALTERNATE, np.minimum(alternate, saved), saved)
    saved = np.where(c.recompute == FULL, 2.0 * at.tokens * at.hidden / shared, saved)
    saved = saved + np.where((c.recompute == SELECTIVE) | (c.recompute == FULL), 0.0, core_saved)
    forward = _joined(forward, end)
    backward = _backward(forward)
    return LayerWork(
        _joined(forward, core, scan),
        _joined(backward, _core_backward(core, c), _core_backward(scan, c)),
        again,
        saved,
        whole,
        params,
        expert_params,
    )


def _alone(
    pieces: dict[str, PassWork], given: dict[str, Amount], c: Candidates
) -> tuple[list[PassWork], Amount]:
    """What is computed again of `PARTS`, of their works and what each needs not keep; bytes not kept."""
    works: list[PassWork] = []
    dropped: Amount = 0.0
    for part in PARTS:
        chosen = c.computes_again(part)
        if part == "activations":  # inside the experts where those are
            chosen = chosen * (1 - c.computes_again("experts"))
        if chosen.any():
            works.append(pieces[part].scaled(chosen))
            dropped = dropped + given[part] * chosen
    return works, dropped


def _every_other(linears: Sequence[Linear], before: int, at: CandidateSizes) -> Amount:
    """Bytes of the outputs of every other product, the layer's first, third and so on, after `before` others.
    Those cut along their inputs are summed into the residual, which no backward needs."""
    saved: Amount = 0.0
    for index, linear in enumerate(linears, start=before):
        if index % 2 == 0 and linear.cut != "in":
            rows = at.candidates.microbatch if linear.per_sample else at.tokens
            saved = saved + 2.0 * rows * linear.outputs / (at.tp if linear.cut == "out" else 1.0)
    return saved


def _core_output(part: Attention | StateSpace, at: CandidateSizes) -> Amount:
    """Bytes of what the part between the projections gives, with the sums of fused attention's softmax."""
    if not isinstance(part, Attention):
        return 2.0 * at.tokens * part.inner / at.tp
    sums = np.where(at.candidates.flash > 0, 4.0, 0.0)
    return at.tokens * part.heads * (2.0 * part.value_dim + sums) / at.tp


def _latent(linears: Sequence[Linear], work: PassWork, at: CandidateSizes) -> Amount:
    """Add the products from latent vectors to queries, keys and values; returns their outputs' bytes."""
    ups = [linear for linear in linears if linear.name in ("q_up", "kv_up")]
    products(ups, work, at)
    return sum((2.0 * at.tokens * linear.outputs / at.tp for linear in ups), start=0.0)


def _core(part: Attention | StateSpace, work: PassWork, at: CandidateSizes) -> tuple[Amount, Amount]:
    """Between the projections; returns bytes saved always, and those of scores that are saved if explicit."""
    c = at.candidates
    if not isinstance(part, Attention):
        flops = at.tokens * part.core_flops(at.seq) / at.tp
        work.product(at.tokens, SCAN_SLOWER * flops / at.tokens / 2.0 / 128.0, 128.0, low=False, attention=2)
        width = (part.inner + 2 * part.groups * part.state) / at.tp
        work.stream(at.tokens * width * 12.0, 4.0)
        return at.tokens * width * 2.0 * 3.0 + _states(part, work, at), 0.0
    heads = part.heads / at.tp
    keys = part.keys(at.seq, causal=True)
    square = part.keys(at.seq, causal=False)
    flash = c.flash > 0
    # Explicit attention computes the whole square and masks half of it.
    visible = np.where(flash, keys, square)
    rows = at.tokens / c.microbatch
    many = c.microbatch * heads
    for width, inner in ((part.head_dim, True), (part.value_dim, False)):
        n, k = (visible, width) if inner else (width, visible)
        work.product(rows, n, k, copies=many * flash, low=False, attention=True)
        work.product(rows, n, k, copies=many * ~flash, low=False)
    scores = at.tokens * heads * square
    each = 4.0 + (5.0 if at.dropout else 0.0)
    apart = ~flash & (many % SOFTMAX_BATCHES > 0)
    work.stream(np.where(flash, 0.0, scores * (each + TORCH_SOFTMAX_BYTES * apart)))
    work.launches = work.launches + TORCH_SOFTMAX_KERNELS * apart
    wide = part.heads * (part.head_dim + part.value_dim) / at.tp
    # Key/value heads are cut no finer than there are: further ranks hold the same ones.
    narrow = part.kv_heads * (part.head_dim + part.value_dim) / np.minimum(at.tp, part.kv_heads)
    if part.kind == "mla":
        # Latent attention makes keys and values for every query head.
        narrow = wide
    elements = at.tokens * (part.heads * part.head_dim / at.tp + narrow)
    work.stream(elements * 4.0)
    # Of the whole sample: every rank's queries read all keys before them.
    kv_bytes = 2.0 * at.tokens * c.cp * narrow
    work.messages.append(LayerCollective("all_gather", "cp", kv_bytes, hidden=1))
    kept = 2.0 * elements + np.where(flash, 4.0 * at.tokens * heads, 0.0)
    return kept, np.where(flash, 0.0, scores * (5.0 if at.dropout else 2.0))


def _states(part: StateSpace, work: PassWork, at: CandidateSizes) -> Amount:
    """Across context-parallel ranks: the summaries of all pieces are gathered in 32 bits, each rank puts
    those in front of its own together, and the short convolution needs the last tokens of the piece before.
    Returns the bytes of the states that pieces begin with, which are saved."""
    c = at.candidates
    several = c.cp > 1
    pieces = CP_PIECES * c.microbatch * several
    whole = 4.0 * part.summary / at.tp * pieces * c.cp
    work.messages.append(LayerCollective("all_gather", "cp", whole, several * 1.0))
    halo = 2.0 * (part.conv - 1) * part.conv_channels / at.tp * pieces
    work.messages.append(LayerCollective("send", "cp", halo, several * 1.0))
    work.stream(whole, several * 2.0)
    if part.form == "delta":
        before = pieces * (CP_PIECES * c.cp - 1) / 2.0
        heads = part.heads / at.tp
        for width in (part.head_dim, part.state):  # what is added, then the matrix itself
            work.products.append(Product(part.state, width, part.state, copies=heads * before, low=False))
    return 4.0 * part.inner * part.state / at.tp * pieces


def _tensor_parallel(work: PassWork, at: CandidateSizes) -> None:
    """The sum after a row-cut product, or its two halves around it."""
    num_bytes = 2.0 * at.tokens * at.hidden
    sp = at.candidates.sp > 0
    work.messages.append(LayerCollective("all_reduce", "tp", num_bytes, ~sp * 1.0, hidden=1))
    gathered = SENT_BYTES[np.asarray(at.candidates.dtype, int)] * at.tokens * at.hidden
    work.messages.append(LayerCollective("all_gather", "tp", gathered, sp * 1.0, hidden=1))
    work.messages.append(LayerCollective("reduce_scatter", "tp", num_bytes, sp * 1.0, hidden=1))


def _backward(forward: PassWork) -> PassWork:
    """Two products for each one, the same messages the other way round, one more gather with `sp`."""
    work = PassWork()
    for p in forward.products:
        work.product(p.m, p.k, p.n, copies=p.copies, low=p.low, grouped=p.grouped, scaled=p.scaled_back)
        work.product(p.n, p.k, p.m, copies=p.copies, low=p.low, grouped=p.grouped, scaled=False)
    dense = [p for p in forward.products if not p.grouped]
    # Grouped products are started by expert, which `expert_launches` counts.
    work.launches = work.launches - 2.0 * (len(forward.products) - len(dense))
    work.stream(forward.stream_bytes * BACKWARD_STREAM, (forward.launches - len(dense)) * 1.5)
    work.expert_launches = 2.0 * forward.expert_launches
    work.permuted_bytes = forward.permuted_bytes
    for message in forward.messages:
        extra = 2.0 if message.axis == "tp" and message.kind == "all_gather" else 1.0
        hidden = 2 if message.axis == "tp" and message.kind != "all_gather" else message.hidden
        work.messages.append(message._replace(times=message.times * extra, hidden=hidden))
    return work


def _core_backward(core: PassWork, c: Candidates) -> PassWork:
    """Fused attention forms the scores once more: 2.5 products for each; explicit attention 2."""
    work = PassWork()
    if not core.products:
        return work
    for p in core.products:
        work.product(p.m, p.n, p.k, copies=p.copies * (2.5 if p.attention else 2.0), low=False)
        work.products[-1] = work.products[-1]._replace(attention=p.attention)
    launches = np.maximum(core.launches - len(core.products), 2.0)
    work.stream(core.stream_bytes * np.where(c.flash > 0, BACKWARD_STREAM, SCORES_BACKWARD), launches)
    work.messages += [m._replace(times=m.times * 2.0) for m in core.messages]
    return work


def _joined(*works: PassWork) -> PassWork:
    """All of them in one."""
    joined = PassWork()
    for work in works:
        joined.products += work.products
        joined.messages += work.messages
        joined.stream(work.stream_bytes, work.launches)
        joined.expert_launches = joined.expert_launches + work.expert_launches
        joined.permuted_bytes = joined.permuted_bytes + work.permuted_bytes
    return joined
