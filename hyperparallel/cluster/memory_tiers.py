"""One memory tier: how much it holds and how fast one device reaches it.

The first tier of a cluster is the device's own memory; further ones (host memory, a pool, disks) are
where tensors are moved to. `shared_by` devices of one host share the bandwidth and the capacity: one of
them alone gets `read_bytes_s`; all of them at once get `read_bytes_s / shared_by` each only where the tier,
not the device's own port, is the bottleneck (`contended`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hyperparallel.cluster import bounds

EXAMPLE_MEMORY = "{name: device, capacity_bytes: 80e9, read_bytes_s: 3.35e12, write_bytes_s: 3.35e12}"
"""A tier as a cluster file gives it, for messages."""


@dataclass(frozen=True)
class Tier:
    """Memory that a device can keep tensors in.

    capacity_bytes: of the whole tier, for `shared_by` devices together. read_bytes_s, write_bytes_s: as
    ONE device sees them, towards it and away from it, when it is alone. total_bytes_s: what all `shared_by`
    devices get together (None: `shared_by` times as much as one, so no contention).
    """

    name: str
    capacity_bytes: float
    read_bytes_s: float
    write_bytes_s: float
    shared_by: int = 1
    total_bytes_s: float | None = None
    latency_s: float = 0.0
    source: str = ""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        where = f"memory.{self.name}"
        capacity = bounds.CAPACITY if self.name in ("device", "host") else bounds.STORAGE
        bounds.check_bounds(f"{where}.capacity_bytes", self.capacity_bytes, capacity)
        rate = bounds.MEMORY_RATE if self.name == "device" else bounds.TIER_RATE
        bounds.check_bounds(f"{where}.read_bytes_s", self.read_bytes_s, rate)
        bounds.check_bounds(f"{where}.write_bytes_s", self.write_bytes_s, rate)
        bounds.check_count(f"{where}.shared_by", self.shared_by)
        bounds.check_bounds(f"{where}.latency_s", self.latency_s, bounds.LATENCY)
        if self.total_bytes_s is not None:
            bounds.check_bounds(f"{where}.total_bytes_s", self.total_bytes_s, bounds.SHARED_RATE)

    @property
    def capacity_per_device_bytes(self) -> float:
        """An equal share of the capacity.

        >>> Tier("host", 2e12, 55e9, 55e9, shared_by=8).capacity_per_device_bytes
        250000000000.0
        """
        return self.capacity_bytes / self.shared_by

    def contended(self, devices: int | None = None) -> tuple[float, float]:
        """(read, write) bytes per second of one device while `devices` (default all) use the tier at once.

        >>> Tier("host", 2e12, 55e9, 55e9, shared_by=8, total_bytes_s=240e9).contended()
        (30000000000.0, 30000000000.0)
        """
        if self.total_bytes_s is None:
            return self.read_bytes_s, self.write_bytes_s
        # Devices of other hosts do not share: at most `shared_by` of them meet here.
        share = self.total_bytes_s / max(1, min(devices or self.shared_by, self.shared_by))
        return min(self.read_bytes_s, share), min(self.write_bytes_s, share)
