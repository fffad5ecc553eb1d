"""What a device and the links between devices do per second: the numbers that decisions are priced with.

A collective of one rank's `received` bytes over a mesh axis costs `latency + received / bandwidth`; an
op costs the larger of its arithmetic and its memory traffic (the roofline, Williams et al. 2009).
Topology, contention and efficiency curves are not modelled here. `sustained_rates` reads them off a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyperparallel.cluster.axis_links import crossed_bytes_s
from hyperparallel.cluster.cluster import Cluster

# What programs sustain of the data sheet, so that an H100 node gives `Rates()`: 0.4 of bf16 peak over a
# whole layer, three quarters of memory bandwidth, two thirds of a link, and 15 us per collective.
_SUSTAINED_FLOPS, _SUSTAINED_MEMORY, _SUSTAINED_LINK, _COLLECTIVE_S = 0.4, 0.75, 2 / 3, 15e-6


@dataclass(frozen=True)
class Rates:
    """One device and its links.

    flops_per_second, memory_bytes_per_second: sustained, of one device.
    link_bytes_per_second: what one rank can receive from its group; `axis_bytes_per_second` overrides it
        for named mesh axes (axes that leave the node).
    latency_seconds: of one collective.

    The defaults are the ratios of an H100 node (sustained bf16 400 TFLOP/s, 2.5 TB/s HBM, 300 GB/s
    NVLink per direction, 15 us per collective): decisions depend on ratios, not on absolute speed. They are
    used on CPU ranks too, so that a laptop derives the program that the cluster will run.
    """

    flops_per_second: float = 400e12
    memory_bytes_per_second: float = 2.5e12
    link_bytes_per_second: float = 300e9
    latency_seconds: float = 15e-6
    axis_bytes_per_second: Mapping[str, float] = field(default_factory=dict)

    def compute_seconds(self, flops: float, num_bytes: float) -> float:
        """
        >>> Rates(flops_per_second=10.0, memory_bytes_per_second=100.0).compute_seconds(20.0, 100.0)
        2.0
        """
        return max(flops / self.flops_per_second, num_bytes / self.memory_bytes_per_second)

    def collective_seconds(self, axis: str, received_bytes: float) -> float:
        """
        >>> Rates(link_bytes_per_second=10.0, latency_seconds=1.0).collective_seconds("tp", 20.0)
        3.0
        """
        bandwidth = self.axis_bytes_per_second.get(axis, self.link_bytes_per_second)
        return self.latency_seconds + received_bytes / bandwidth

    def message_bytes(self, axes: Sequence[str], total_bytes: float) -> float:
        """The size of the messages in which `total_bytes`, that become ready one by one, travel soonest.

        Messages of b bytes pay total / b latencies, and the last, begun when all is ready, is hidden
        behind nothing: total / b * latency + b / bandwidth is least for sqrt(total * latency * bandwidth).

        >>> Rates(link_bytes_per_second=10.0, latency_seconds=1.0).message_bytes(("dp",), 40.0)
        20.0
        """
        speeds = [self.axis_bytes_per_second.get(axis, self.link_bytes_per_second) for axis in axes]
        return math.sqrt(total_bytes * self.latency_seconds * min(speeds))


def sustained_rates(cluster: Cluster, axes: Mapping[str, int] | None = None) -> Rates:
    """What the layout solver is priced with on a cluster.

    axes: mesh axis -> size, innermost first; each is priced with the slowest fabric tier it crosses.
    """
    links = crossed_bytes_s(cluster, axes or {})
    # For axes that are not named; 2e12 where one device has no links at all, so that nothing is priced by
    # them.
    fastest = max((tier.bytes_s for tier in cluster.fabric if tier.num_members > 1), default=2e12)
    hops = [tier.latency_s for tier in cluster.fabric if tier.num_members > 1]
    return Rates(
        flops_per_second=_SUSTAINED_FLOPS * next(iter(cluster.device.peak_flop_s.values())),
        memory_bytes_per_second=_SUSTAINED_MEMORY * cluster.device.memory_bytes_s,
        link_bytes_per_second=_SUSTAINED_LINK * fastest,
        latency_seconds=max([_COLLECTIVE_S, *hops]),
        axis_bytes_per_second={axis: _SUSTAINED_LINK * rate for axis, rate in links.items()},
    )
