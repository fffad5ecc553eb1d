"""What a device and the links between devices do per second: the numbers that decisions are priced with.

A collective of one rank's `received` bytes over a mesh axis costs `latency + received / bandwidth`; an
op costs the larger of its arithmetic and its memory traffic (the roofline, Williams et al. 2009).
Topology, contention and efficiency curves are not modelled here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
