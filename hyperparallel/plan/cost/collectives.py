"""Seconds of a collective on a described network, over arrays of groups.

A group of G ranks has g0 members inside the first tier, g1 such bundles inside the second, and so on. A ring
(or a one-step exchange on a full mesh) through all of them is as fast as its slowest tier, where a bundle
enters and leaves through the links of all its members:

    B           = min over tiers i with g_i > 1 of  b_i * (g_0 ... g_(i-1)) * efficiency_i
    all-reduce  = 2 min over protocols of  base + hops + (G - 1) / G * n / (B * share);  all-gather and
                  reduce-scatter half of it
    all-to-all  = max over tiers of  n * (share of peers reached through tier i) / (b_i * efficiency_i) + hops
    send        = n / b of the tier that is crossed + one hop
    hops        = latency_i * (g_i - 1) in the first tier (a ring) and * log2 g_i outside (a tree), each way

Of an all-to-all whose bytes are `copies` of one another (a token sent to several experts), a rank or a bundle
that holds several of the receivers is sent one: of G ranks G (1 - (1 - 1/G)^copies) are reached inside the
first tier, and of g bundles (g - 1) (1 - (1 - 1/g)^copies) outside.
n is the whole tensor (all-to-all, send: what one rank sends). On a mesh or torus b_i is that of the links
inside the group; the dimensions of one fabric tier are tiers of their own. Checked against NCCL's all-reduce
on 2 to 128 A100 (benchmarks/results/leaderboard.md). Left out: contention between groups (the event
simulation shares links), stragglers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.plan.cost.constants import Constants
from hyperparallel.plan.cost.work import Array

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
NUM_TIERS = 4
HOPS = 1.5
"""On the latency of a hop: protocol and synchronisation (NCCL's all-reduce of few bytes on 2 to 128 A100)."""


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
class Groups:
    """Groups of ranks, one per row: members per tier, bandwidth and latency of each tier, padded to 4;
    protocols: 1 where a library of kernels chooses one by size, 0 where threads of one machine exchange."""

    members: Array
    bytes_s: Array
    latency_s: Array
    protocols: Array

    @property
    def size(self) -> Array:
        """Ranks in each group."""
        product: Array = self.members.prod(axis=1)
        return product

    def take(self, rows: np.ndarray) -> Groups:
        """Those at the given positions."""
        return Groups(self.members[rows], self.bytes_s[rows], self.latency_s[rows], self.protocols[rows])


def groups_of(cluster: Cluster, members: Array) -> Groups:
    """Groups that have `members` [rows, dims] in each dimension of the fabric (`placement.spans`)."""
    count, tiers = len(members), list(cluster.dim_tiers)
    columns, rates, latencies = [], [], []
    for dim, tier in enumerate(tiers):
        fabric = cluster.fabric[tier]
        inside = dim - tiers.index(tier)
        width, here = fabric.size[inside], members[:, dim]
        rate = fabric.dim_bytes_s(inside) / fabric.oversubscription
        used = (here - 1) / max(width - 1, 1) if fabric.kind == "mesh" else np.ones(count)
        columns.append(here)
        rates.append(np.maximum(rate * np.clip(used, 0.0, 1.0), 1.0))
        latencies.append(np.full(count, fabric.latency_s))
    while len(columns) > NUM_TIERS:  # the two innermost dimensions of a mesh work side by side
        columns[:2] = [columns[0] * columns[1]]
        rates[:2] = [rates[0] + rates[1]]
        latencies[:2] = [np.maximum(latencies[0], latencies[1])]
    while len(columns) < NUM_TIERS:
        columns.append(np.ones(count))
        rates.append(np.ones(count))
        latencies.append(np.zeros(count))
    protocols = np.full(count, float(cluster.device.threads is None))
    return Groups(np.stack(columns, 1), np.stack(rates, 1), np.stack(latencies, 1), protocols)


def collective_seconds(
    kind: Array, num_bytes: Array, groups: Groups, constants: Constants, copies: Array | float = 1.0
) -> Array:
    """Seconds of one collective per row; 0 in groups of one rank.

    kind: positions in `KINDS`. num_bytes: see the module. copies: see `Message`.
    """
    members, size = groups.members, groups.size
    efficiency = np.full(NUM_TIERS, constants.network)
    efficiency[0] = constants.link
    rates = groups.bytes_s * efficiency
    bundle = np.concatenate([np.ones((len(size), 1)), np.cumprod(members, 1)[:, :-1]], 1)
    used = members > 1
    ring = np.where(used, rates * bundle, np.inf).min(axis=1)
    passes = np.where(kind == 0, 2.0, 1.0)
    steps = np.where(used, members - 1, 0.0)
    steps[:, 1:] = np.log2(np.maximum(members[:, 1:], 1.0))
    hops = HOPS * (groups.latency_s * steps).sum(axis=1)
    plain = (size - 1) / size * num_bytes / ring + hops
    seconds = np.where(groups.protocols > 0, np.inf, plain)
    for protocol in PROTOCOLS:
        near = protocol.near * groups.latency_s[:, 0] * steps[:, 0]
        far = protocol.far * (groups.latency_s[:, 1:] * steps[:, 1:]).sum(axis=1)
        travel = (size - 1) / size * num_bytes / (ring * protocol.share)
        seconds = np.where(
            groups.protocols > 0, np.minimum(seconds, protocol.base_s + near + far + travel), seconds
        )
    seconds = passes * seconds
    peers = (np.cumprod(members, 1) - bundle) / size[:, None]
    outside = members[:, 1:].prod(axis=1)
    distinct = (
        (outside - 1) * (1 - (1 - 1 / outside) ** copies) / (copies * np.maximum(1 - 1 / outside, 1e-9))
    )
    peers[:, 0] *= np.minimum(size * (1 - (1 - 1 / size) ** copies) / copies, 1.0)
    peers[:, 1:] *= np.where(outside > 1, distinct, 1.0)[:, None]
    exchange = np.where(used, num_bytes[:, None] * peers / rates, 0.0).max(axis=1) + hops
    slowest = np.where(used, rates, np.inf).min(axis=1)
    send = num_bytes / slowest + HOPS * groups.latency_s.max(axis=1, where=used, initial=0.0)
    seconds = np.where(kind == 3, exchange, np.where(kind == 4, send, seconds))
    return np.where(size > 1, seconds, 0.0)
