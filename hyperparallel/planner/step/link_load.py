"""Which links a strategy's messages use, and how much: bytes of a step on every dimension of the fabric.

Follows `cost/collectives.py`: of a ring of n bytes a device sends (G - 1) / G * n, and on a dimension inside
which b devices sit the b-th part of that, for a bundle enters and leaves through the links of all its
members; an all-to-all sends what is meant for the peers behind that dimension. Load is the share of a link's
capacity that is used over the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.planner.cost.collectives import NUM_TIERS, PRICED_KINDS, GroupArrays
from hyperparallel.planner.cost.price import GATHERED_BYTES
from hyperparallel.planner.cost.rows import HEAD, Rows
from hyperparallel.planner.cost.work import Array
from hyperparallel.planner.strategy import Strategy


class Link(NamedTuple):
    """One tier of the fabric: its name, kind, width and bytes a second of a device; which axes cross it
    and in groups of how many; bytes that a device sends over it in a step, by axis."""

    name: str
    kind: str
    width: int
    bytes_s: float
    members: Mapping[str, int]
    sent_bytes: Mapping[str, float]

    def load(self, seconds: float) -> float:
        """Share of its capacity that is used in a step of so many seconds."""
        return sum(self.sent_bytes.values()) / (self.bytes_s * seconds)


def tier_names(cluster: Cluster) -> list[str]:
    """A name for every tier of the fabric, as groups have them (`groups_of` joins what is past four).

    >>> from hyperparallel.cluster.presets import preset
    >>> tier_names(preset("ub-mesh-8192"))
    ['rack 8x8', 'pod 4x4', 'superpod']
    """
    names = [
        f"{tier.name} {'x'.join(map(str, tier.size))}" if len(tier.size) > 1 else tier.name
        for tier in cluster.fabric
    ]
    while len(names) > NUM_TIERS:
        names[:2] = [names[0]]
    return names


def sent(kind: int, num_bytes: float, members: Array) -> Array:
    """Bytes that a device sends over each dimension in one collective; members: of its group."""
    size = members.prod()
    used = members > 1
    # Ranks inside one member of a tier, which share its links.
    bundle = np.concatenate([[1.0], np.cumprod(members)[:-1]])
    if size == 1:
        return np.zeros(len(members))
    if PRICED_KINDS[kind] == "all_to_all":
        peers: Array = num_bytes * (np.cumprod(members) - bundle) / size
        return np.asarray(np.where(used, peers, 0.0))
    if PRICED_KINDS[kind] == "send":
        # Taken to be the neighbour across the outermost tier that the axis crosses, where it is slowest.
        outermost = np.arange(len(members)) == np.flatnonzero(used)[-1]
        return np.asarray(np.where(outermost, num_bytes, 0.0))
    passes = 2.0 if PRICED_KINDS[kind] == "all_reduce" else 1.0
    ring: Array = np.where(used, passes * (size - 1) / size * num_bytes / bundle, 0.0)
    return ring


def shares(kind: int, num_bytes: float, groups: GroupArrays, row: int, seconds: float) -> Array:
    """Share of each dimension's bandwidth that a collective of `seconds` takes, at most 1."""
    if seconds <= 0.0:
        return np.zeros(groups.members.shape[1])
    rate = sent(kind, num_bytes, groups.members[row]) / seconds
    return np.asarray(np.minimum(rate / groups.bytes_s[row], 1.0))


def link_loads(cluster: Cluster, strategy: Strategy, rows: Rows) -> list[Link]:
    """Every tier of the fabric that has more than one member, innermost first; rows: of the strategy
    alone, so that each of its cells is one segment."""
    assert rows.length == 1, "one strategy"
    r = {name: float(column[0]) for name, column in rows.row.items()}
    axes = {name: groups for name, groups in rows.groups.items() if name not in ("etp", "edp")}
    total: dict[str, Array] = {axis: np.zeros(NUM_TIERS) for axis in axes}
    per_step = r["microbatches"] / r["pp"]
    for i, segment in enumerate(rows.message_segment):
        layers = rows.segment_layers[segment] * rows.message_count[i]
        members = rows.message_groups.members[i]
        axis = _axis_of(members, axes, int(rows.message_kind[i]))
        total[axis] += per_step * layers * sent(int(rows.message_kind[i]), rows.message_bytes[i], members)
    total["pp"] += 2 * r["microbatches"] * r["virtual"] * sent(4, r["boundary_bytes"], axes["pp"].members[0])
    gathered = float((rows.segment_gather * rows.segment_layers * (rows.segment_pass != HEAD)).sum())
    data = sent(1, gathered * per_step, axes["dp"].members[0])
    if strategy.zero != 3:
        back = GATHERED_BYTES if strategy.zero else r["reduced_bytes"]
        both = (r["reduced_bytes"] + back) / 2.0
        data = sent(0, both * r["params"], axes["dp"].members[0])
        data = data + sent(0, both * r["expert_params"], rows.groups["edp"].members[0])
    total["dp"] += data
    links = []
    names = tier_names(cluster)
    widths = _widths(cluster)
    kinds = [tier.kind for tier in cluster.fabric][-len(names) :]
    for dim, name in enumerate(names):
        if widths[dim] < 2:
            continue
        members_of = {axis: int(g.members[0, dim]) for axis, g in axes.items() if g.members[0, dim] > 1}
        sent_of = {axis: float(v[dim]) for axis, v in total.items() if v[dim] > 0}
        links.append(Link(name, kinds[dim], widths[dim], _rate(cluster, dim), members_of, sent_of))
    return links


def _axis_of(members: Array, axes: Mapping[str, GroupArrays], kind: int) -> str:
    if PRICED_KINDS[kind] == "all_to_all":
        return "ep"
    for axis in ("tp", "cp"):
        if (axes[axis].members[0] == members).all():
            return axis
    return "tp"


def _widths(cluster: Cluster) -> list[int]:
    widths = [tier.num_members for tier in cluster.fabric]
    while len(widths) > NUM_TIERS:
        widths[:2] = [widths[0] * widths[1]]
    return widths


def _rate(cluster: Cluster, dim: int) -> float:
    """Bytes a second of one device over a tier, all of whose links it uses."""
    rates = [tier.bytes_s / tier.oversubscription for tier in cluster.fabric]
    while len(rates) > NUM_TIERS:
        rates[:2] = [rates[0]]
    return rates[dim]
