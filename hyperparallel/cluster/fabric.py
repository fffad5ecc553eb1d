"""One tier of the network that connects devices: its shape, its speed and what it shares.

switch: every member reaches every other through switches (Clos); one number.
mesh:   a full mesh in each dimension: a device has a direct link to each of the d - 1 others of its row.
torus:  rings in each dimension, two links per dimension.
ring:   one ring; one number.

`bytes_s` is what one device sends, in one direction, over ALL its links of this tier together: so a full
mesh of 8 x 8 with 14 links of 56 GB/s says 784e9, and a torus of three dimensions counts six links.
A tier whose traffic leaves through the ports of another one (`shares`) competes with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hyperparallel.cluster import bounds
from hyperparallel.errors import ClusterError, nearest

FABRIC_KINDS = ("switch", "mesh", "torus", "ring")
EXAMPLE_TIER = "{name: nvlink, kind: switch, size: [8], bytes_s: 450e9, latency_s: 2e-6}"
"""A tier as a cluster file gives it, for messages."""


@dataclass(frozen=True)
class Fabric:
    """Links of one kind between `num_members` members: devices, or whole groups of the tier inside.

    size: members per dimension (switch and ring: one number). bytes_s: per device and direction, all its
    links of this tier. latency_s: one hop, software included. Sums in switches
    are not priced apart: bytes_s is what collectives reach with them.
    oversubscription: how many times less than full bisection the tier carries when all devices send.
    shares: name of the tier whose ports it uses, so that collectives over both wait for each other in a
    simulated program. source: where the numbers come from.
    """

    name: str
    kind: str
    size: tuple[int, ...]
    bytes_s: float
    latency_s: float
    oversubscription: float = 1.0
    shares: str | None = None
    source: str = ""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        where = f"fabric.{self.name}"
        object.__setattr__(self, "size", tuple(self.size))
        if self.kind not in FABRIC_KINDS:
            near = nearest(self.kind, FABRIC_KINDS, 1)
            raise ClusterError(f"{where}.kind", self.kind, ", ".join(FABRIC_KINDS), near)
        if not self.size or (self.kind in ("switch", "ring") and len(self.size) != 1):
            allowed = "one number for a switch or ring, one per dimension for a mesh or torus"
            raise ClusterError(f"{where}.size", self.size, allowed)
        for size in self.size:
            bounds.check_count(f"{where}.size", size)
        bounds.check_bounds(f"{where}.bytes_s", self.bytes_s, bounds.LINK_RATE)
        bounds.check_bounds(f"{where}.latency_s", self.latency_s, bounds.LATENCY)
        if self.oversubscription < 1:
            raise ClusterError(f"{where}.oversubscription", self.oversubscription, "1.0 (none) or more")

    @property
    def num_members(self) -> int:
        """
        >>> Fabric("rack", "mesh", (8, 8), 784e9, 1e-6).num_members
        64
        """
        return math.prod(self.size)

    def dim_bytes_s(self, dim: int) -> float:
        """What one device sends in one direction over its links of one dimension.

        A mesh has d - 1 links in a dimension of d, a torus two (one where d is 2), all equally fast.

        >>> Fabric("pod", "mesh", (8, 4), 100e9, 1e-6).dim_bytes_s(0)
        70000000000.0
        """
        links = [self._links(size) for size in self.size]
        return self.bytes_s * links[dim] / sum(links) if any(links) else self.bytes_s

    def _links(self, size: int) -> int:
        """Links of one device in a dimension of `size`."""
        return min(2, size - 1) if self.kind in ("torus", "ring") else size - 1

    def narrowed(self, size: tuple[int, ...]) -> Fabric:
        """The same fabric where only `size` of it is used; links to members that are not used carry nothing.

        >>> Fabric("rack", "mesh", (8, 8), 784e9, 1e-6).narrowed((8, 1)).bytes_s
        392000000000.0
        """
        before, after = (sum(self._links(n) for n in shape) for shape in (self.size, size))
        rate = self.bytes_s
        # A switch gives a device its full rate with any peer; direct links to unused peers carry nothing.
        if self.kind != "switch" and before and after:
            rate = rate * after / before
        return replace(self, size=size, bytes_s=rate)
