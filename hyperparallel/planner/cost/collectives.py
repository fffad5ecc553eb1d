"""Seconds of a collective on a described network, over arrays of groups.

A group of G ranks has g0 members inside the first tier, g1 such bundles inside the second, and so on. A ring
(or direct exchanges on a full mesh) through all of them is as fast as its slowest tier, where a bundle enters
and leaves through the links of all its members:

    B           = min over tiers i with g_i > 1 of  b_i * (g_0 ... g_(i-1)) * efficiency_i
    all-reduce  = 2 min over protocols of  base + hops + (G - 1) / G * n / (B * share);  all-gather and
                  reduce-scatter half of it
    all-to-all  = max over tiers of  n * (share of peers reached through tier i) / (b_i * efficiency_i) + hops
    send        = n / b of the tier that is crossed + one hop
    hops        = steps_i * latency_i, each way; steps: g_i - 1 in a first tier of switches (a ring), log2 g_i
                  in outer ones (a tree); 1 for each dimension of a mesh (direct); g - 1 for each of a torus.
                  All-gather and reduce-scatter have no tree in NCCL: their ring goes through every bundle,
                  (g_0 - 1) hops inside each of g_1 g_2 ... bundles and g_1 g_2 ... - 1 between them

b_i of a mesh or torus is what the group's own links carry there. With r_d of dimension d and g_d members,

    r_d         = (g - 1) links on a full mesh; on a torus 2 links where the group closes the ring, 1 where it
                  does not, divided by the groups that interleave on the same links (its stride)
    b           = min over sets S of its dimensions of  (G - 1) / (prod over S of g_d - 1) * sum over S of r_d

Pieces of the tensor go through the dimensions in different orders at the same time; b is the best mix of all
orders (the bytes of the orders span the base polytope of G_S - 1). It is the sum of all r_d on full meshes,
and wherever no dimension is much slower than the rest. An all-to-all sends each byte once through every
dimension in which its ends differ: h_d = (g - 1) / g of the bytes on a mesh, g / 4 of them (the mean
distance) on a torus, and the slowest h_d / r_d counts.

Where a tier is oversubscribed (ports shared by ranks), a group with several but not all ranks of a node goes
through one rank's share of them: its rings and those beside it meet in the same ports (8 GPUs, 4 ports).

Of an all-to-all whose bytes are `copies` of one another (a token sent to several experts), a rank or a bundle
that holds several of the receivers is sent one: of G ranks G (1 - (1 - 1/G)^copies) are reached inside the
first tier, and of g bundles (g - 1) (1 - (1 - 1/g)^copies) outside.
n is the whole tensor (all-to-all, send: what one rank sends). Checked against NCCL's all-reduce on 2 to 128
A100 (benchmarks/results/leaderboard.md). Left out: contention between groups of different axes (the event
simulation shares links), stragglers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import combinations
from typing import NamedTuple

import numpy as np

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.work import Array

PRICED_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
NUM_TIERS = 4
HOPS = 1.5
"""On the latency of a hop where no protocol is chosen: all-to-all, send, meshes, tori, threads (read off
NCCL's all-reduce of few bytes on 2 to 128 A100)."""


class Protocol(NamedTuple):
    """How data and the word that it has arrived travel together. base_s: seconds of a pass before anything
    moves. near, far: latencies of the innermost tier's fabric for each of its hops, and of those outside.
    share: of the bandwidth that large messages reach."""

    base_s: float
    near: float
    far: float
    share: float


PROTOCOLS = (
    Protocol(2.7e-6, 0.9, 1.08, 1 / 16),
    Protocol(26e-6, 0.37, 1.6, 0.79),
    Protocol(52e-6, 0.0, 4.8, 1.0),
)
"""NCCL's LL (a flag with every 4 bytes), LL128 (with every 120) and Simple (after every chunk), half an
all-reduce each. Read off Echo's all-reduces of 8 bytes to 8 GB on 2 to 128 A100; NCCL's own model
(src/graph/tuning.cc) has the same form and order with shorter latencies, which the timings exceed."""


@dataclass
class GroupArrays:
    """Groups of ranks, one per row: members of each tier, bandwidth, latency and steps, padded to 4 tiers.

    detour: how many times longer than at `bytes_s` an all-to-all takes in the tier. protocols [rows]: 1
    where a library for switched networks chooses one by size, 0 where threads, meshes or tori exchange.
    ports: of a bundle of ranks towards each tier, in those of one rank."""

    members: Array
    bytes_s: Array
    latency_s: Array
    steps: Array
    detour: Array
    protocols: Array
    ports: Array

    @property
    def size(self) -> Array:
        """Ranks in each group."""
        product: Array = self.members.prod(axis=1)
        return product

    def take(self, rows: np.ndarray) -> GroupArrays:
        """Those at the given positions."""
        return GroupArrays(*(getattr(self, f.name)[rows] for f in fields(self)))


def groups_of(cluster: Cluster, members: Array, strides: Array | None = None) -> GroupArrays:
    """Groups that have `members` [rows, dims] in each dimension of the fabric (`axis_links.placed`)."""
    count, dims = len(members), list(cluster.dim_tiers)
    one = np.ones(count)
    strides = np.ones(members.shape) if strides is None else strides
    columns = []
    for tier, fabric in enumerate(cluster.fabric):
        at = [dim for dim in range(len(dims)) if dims[dim] == tier]
        here = members[:, at]
        rates = np.stack([_rate(fabric, i, here[:, i], strides[:, d]) for i, d in enumerate(at)], 1)
        inside = here.prod(axis=1)
        rate = np.maximum(_side_by_side(here, rates), 1.0)
        worst = (_travelled(fabric, here) / np.maximum(rates, 1.0)).max(axis=1, initial=0.0)
        detour = np.where(inside > 1, worst * rate / np.maximum(1.0 - 1.0 / inside, 0.5), 1.0)
        columns.append((inside, rate, fabric.latency_s * one, _steps(fabric, here, tier == 0), detour))
    while len(columns) > NUM_TIERS:  # machines of many tiers: the two innermost as one
        (a, rate, latency, steps, detour), (b, *_, more, _) = columns[:2]
        # The pair goes at the inner tier's rate and latency; of the outer one only its hops are left.
        columns[:2] = [(a * b, rate, latency, steps + more, detour)]
    while len(columns) < NUM_TIERS:
        columns.append((one, one, 0.0 * one, 0.0 * one, one))
    switches = all(fabric.kind == "switch" for fabric in cluster.fabric)
    protocols = np.full(count, float(switches and cluster.device.threads is None))
    members, bytes_s, latency_s, steps, detour = (np.stack(c, 1) for c in zip(*columns, strict=True))
    return GroupArrays(members, bytes_s, latency_s, steps, detour, protocols, _ports(cluster, members))


def _ports(cluster: Cluster, members: Array) -> Array:
    """Ports of a bundle of ranks towards each tier, in those of one rank: see the module."""
    ports = np.concatenate([np.ones((len(members), 1)), np.cumprod(members, 1)[:, :-1]], 1)
    if 1 < len(cluster.fabric) <= NUM_TIERS and cluster.fabric[0].kind == "switch":
        beside = members[:, 0]
        part = (beside > 1) & (beside < cluster.fabric[0].size[0])
        for tier, fabric in enumerate(cluster.fabric):
            if fabric.oversubscription > 1:
                # Its rings and those of the groups beside it leave through the same ports.
                ports[:, tier] /= np.where(part, beside, 1.0)
    return ports


def _rate(fabric: Fabric, dim: int, members: Array, strides: Array) -> Array:
    """Bytes a second that a rank of the group sends through one dimension; 0 where it has no peer there."""
    width = fabric.size[dim]
    share = np.ones(len(members))
    if fabric.kind == "mesh":
        share = np.minimum((members - 1) / max(width - 1, 1), 1.0)
    elif fabric.kind in ("torus", "ring"):
        share = np.where(members * strides >= width, 1.0, 0.5) / strides
    result: Array = np.where(members > 1, fabric.dim_bytes_s(dim) / fabric.oversubscription * share, 0.0)
    return result


def _side_by_side(members: Array, rates: Array) -> Array:
    """What the dimensions of a tier carry together, each byte once: see the module."""
    best = rates.sum(axis=1)
    dims = members.shape[1]
    whole = members.prod(axis=1)
    for size in range(1, dims):
        for some in combinations(range(dims), size):
            # Any order sends at least this much through these dimensions: the smallest of all limits is
            # reached.
            must = members[:, some].prod(axis=1) - 1.0
            limit = np.where(
                must > 0, rates[:, some].sum(axis=1) * (whole - 1) / np.maximum(must, 1.0), np.inf
            )
            best = np.minimum(best, limit)
    return np.asarray(best)


def _travelled(fabric: Fabric, members: Array) -> Array:
    """Times that a byte of an all-to-all inside the tier goes through a dimension, on average."""
    if fabric.kind in ("torus", "ring"):
        return np.asarray(members**2 // 4 / members)
    return np.asarray(1.0 - 1.0 / members)


def _steps(fabric: Fabric, members: Array, first: bool) -> Array:
    """Hops one after the other of an all-gather."""
    if fabric.kind == "mesh":
        return np.asarray((members > 1).sum(axis=1), float)
    if first or fabric.kind != "switch":
        return np.asarray((members - 1).sum(axis=1), float)
    return np.asarray(np.log2(members.prod(axis=1)))


def collective_seconds(
    kind: Array, num_bytes: Array, groups: GroupArrays, constants: Constants, copies: Array | float = 1.0
) -> Array:
    """Seconds of one collective per row; 0 in groups of one rank.

    kind: positions in `PRICED_KINDS`. num_bytes: see the module. copies: see `Message`.
    """
    seconds = np.zeros(len(kind))
    many = groups.size > 1
    kinds = PRICED_KINDS
    for priced, names in ((_ringed, kinds[:3]), (_exchanged, kinds[3:4]), (_sent, kinds[4:])):
        first, last = kinds.index(names[0]), kinds.index(names[-1])
        at = np.flatnonzero(many & (kind >= first) & (kind <= last))
        if len(at):
            twice = np.where(kind[at] == 0, 2.0, 1.0)
            copied = np.broadcast_to(copies, kind.shape)[at]
            seconds[at] = twice * priced(num_bytes[at], groups.take(at), constants, copied, kind[at])
    return seconds


def _rates(groups: GroupArrays, constants: Constants) -> Array:
    """Bytes a second of one rank towards each tier."""
    efficiency = np.full(NUM_TIERS, constants.network)
    efficiency[0] = constants.link
    return np.asarray(groups.bytes_s * efficiency)


def _least(values: Array) -> Array:
    """Of each row, column by column: there are many rows and four columns."""
    least = values[:, 0]
    for column in range(1, values.shape[1]):
        least = np.minimum(least, values[:, column])
    return least


def _hops(groups: GroupArrays) -> Array:
    return np.asarray(HOPS * (groups.latency_s * groups.steps).sum(axis=1))


def _ringed(num_bytes: Array, groups: GroupArrays, constants: Constants, _: Array, kind: Array) -> Array:
    """Of one pass around a ring, or by the best protocol."""
    size = groups.size
    ring = _least(np.where(groups.members > 1, _rates(groups, constants) * groups.ports, np.inf))
    travel = (size - 1) / size * num_bytes / ring
    seconds = np.full(len(size), np.inf)
    reached = groups.latency_s * groups.steps
    inside, outside = reached[:, 0], reached[:, 1:].sum(axis=1)
    bundles = groups.members[:, 1:].prod(axis=1)
    far = -_least(-np.where(groups.members[:, 1:] > 1, groups.latency_s[:, 1:], 0.0))
    # Only all-reduces have trees: a ring passes through every rank of every bundle.
    inside = np.where(kind == 0, inside, inside * bundles)
    outside = np.where(kind == 0, outside, far * (bundles - 1))
    for p in PROTOCOLS:
        seconds = np.minimum(seconds, p.base_s + p.near * inside + p.far * outside + travel / p.share)
    return np.where(groups.protocols > 0, seconds, travel + _hops(groups))


def _exchanged(num_bytes: Array, groups: GroupArrays, constants: Constants, copies: Array, _: Array) -> Array:
    """Of an all-to-all."""
    members, size = groups.members, groups.size
    reached = np.cumprod(members, 1)
    # Of the ranks reached up to a tier, those that the tiers inside it do not reach.
    peers = (reached - np.concatenate([np.ones((len(size), 1)), reached[:, :-1]], 1)) / size[:, None]
    outside = members[:, 1:].prod(axis=1)
    distinct = (
        (outside - 1) * (1 - (1 - 1 / outside) ** copies) / (copies * np.maximum(1 - 1 / outside, 1e-9))
    )
    peers[:, 0] *= np.minimum(size * (1 - (1 - 1 / size) ** copies) / copies, 1.0)
    peers[:, 1:] *= np.where(outside > 1, distinct, 1.0)[:, None]
    share = peers * groups.detour / _rates(groups, constants)
    # Tiers are crossed beside one another: the slowest counts.
    return -_least(-np.where(members > 1, share, 0.0)) * num_bytes + _hops(groups)


def _sent(num_bytes: Array, groups: GroupArrays, constants: Constants, *_: Array) -> Array:
    """To the next rank of the group."""
    used = groups.members > 1
    slowest = _least(np.where(used, _rates(groups, constants), np.inf))
    return np.asarray(num_bytes / slowest - HOPS * _least(-np.where(used, groups.latency_s, 0.0)))
