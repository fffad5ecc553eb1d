"""A whole machine: one kind of device, its memory tiers, and the fabric tiers that connect devices.

Fabric tiers stand innermost first, each connecting whole groups of the tier inside it; the number of
devices is the product of all their sizes. Tiers of size 1 stay in the description, so that `resized` knows
what a larger machine of the same kind would be connected with.

Left out: mixed kinds of device in one machine, failed links, and traffic of other jobs.
Files are read and written in `files.py`; machines that are known by name are in `presets/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hyperparallel.cluster import bounds
from hyperparallel.cluster.contradictions import check_links, check_memory
from hyperparallel.cluster.device import Device
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.rates import Rates
from hyperparallel.cluster.resize import resized_fabric
from hyperparallel.cluster.tiers import Tier
from hyperparallel.errors import ClusterError, nearest

# What programs sustain of the data sheet, so that an H100 node gives `Rates()`: 0.4 of bf16 peak over a
# whole layer, three quarters of memory bandwidth, two thirds of a link, and 15 us per collective.
_SUSTAINED_FLOPS, _SUSTAINED_MEMORY, _SUSTAINED_LINK, _COLLECTIVE_S = 0.4, 0.75, 2 / 3, 15e-6


@dataclass(frozen=True)
class Cluster:
    """Devices, memory (the device's own first) and fabric (innermost first) of one machine.

    notes: sentences on what the description leaves out or infers, shown in reports.
    """

    name: str
    device: Device
    memory: tuple[Tier, ...]
    fabric: tuple[Fabric, ...]
    notes: tuple[str, ...] = ()

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name in ("memory", "fabric", "notes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.memory:
            raise ClusterError("memory", (), "at least one tier, the device's own memory first")
        _refuse_twins("memory", [tier.name for tier in self.memory])
        _refuse_twins("fabric", [tier.name for tier in self.fabric])
        check_memory(self.memory)
        check_links(self.device, self.fabric)
        if self.num_devices > bounds.MOST_DEVICES:
            raise ClusterError("fabric", self.num_devices, f"sizes that multiply to {bounds.MOST_WORDS}")

    @property
    def num_devices(self) -> int:
        """Product of the sizes of all fabric tiers; 1 where there is none."""
        return math.prod(tier.num_members for tier in self.fabric)

    @property
    def capacity_bytes(self) -> float:
        """Memory of one device."""
        return self.memory[0].capacity_bytes

    @property
    def dims(self) -> tuple[int, ...]:
        """Sizes of all dimensions of all fabric tiers, innermost first."""
        return tuple(size for tier in self.fabric for size in tier.size)

    @property
    def dim_tiers(self) -> tuple[int, ...]:
        """For each of `dims`, the index of the fabric tier that it belongs to."""
        return tuple(index for index, tier in enumerate(self.fabric) for _ in tier.size)

    def tier(self, name: str) -> Tier:
        """The memory tier of that name; a `ClusterError` names those that exist."""
        for tier in self.memory:
            if tier.name == name:
                return tier
        known = [tier.name for tier in self.memory]
        allowed = f"a memory tier of {self.name}: {', '.join(known)}"
        raise ClusterError(
            "memory tier", name, allowed, f"a description that has a tier {name!r}, or no use of it"
        )

    def has_tier(self, name: str) -> bool:
        """Whether `tier(name)` would answer."""
        return any(tier.name == name for tier in self.memory)

    def link(self, name: str) -> Fabric:
        """The fabric tier of that name; a `ClusterError` names those that exist."""
        for tier in self.fabric:
            if tier.name == name:
                return tier
        known = [tier.name for tier in self.fabric]
        allowed = f"a fabric tier of {self.name}: {', '.join(known)}"
        raise ClusterError("fabric tier", name, allowed, nearest(name, known, 1))

    def resized(self, num_devices: int) -> Cluster:
        """The same kind of machine with another number of devices.

        Inner tiers are kept whole and the outermost grows or shrinks; fewer devices than one inner tier
        take a part of it. A `ClusterError` names the nearest counts that work.
        """
        if num_devices == self.num_devices:
            return self
        return replace(self, fabric=resized_fabric(self.name, self.fabric, num_devices))

    def narrowed(self, name: str, *size: int) -> Cluster:
        """The same machine where only `size` of every group of that fabric tier is used (64 of an NVL72)."""
        tier = self.link(name)
        fits = len(size) == len(tier.size)
        if not fits or any(not 1 <= n <= full for n, full in zip(size, tier.size, strict=True)):
            raise ClusterError(f"fabric.{name}.size", size, f"1 to {tier.size}")
        fabric = tuple(link.narrowed(size) if link.name == name else link for link in self.fabric)
        return replace(self, fabric=fabric)

    def rates(self, axes: Mapping[str, int] | None = None) -> Rates:
        """Sustained rates that the layout solver is priced with.

        axes: mesh axis -> size, innermost first; each is priced with the slowest fabric tier it crosses.
        """
        from hyperparallel.cluster.axis_links import crossed_bytes_s

        links = crossed_bytes_s(self, axes or {})
        fastest = max((tier.bytes_s for tier in self.fabric if tier.num_members > 1), default=2e12)
        hops = [tier.latency_s for tier in self.fabric if tier.num_members > 1]
        return Rates(
            flops_per_second=_SUSTAINED_FLOPS * next(iter(self.device.peak_flop_s.values())),
            memory_bytes_per_second=_SUSTAINED_MEMORY * self.device.memory_bytes_s,
            link_bytes_per_second=_SUSTAINED_LINK * fastest,
            latency_seconds=max([_COLLECTIVE_S, *hops]),
            axis_bytes_per_second={axis: _SUSTAINED_LINK * rate for axis, rate in links.items()},
        )

    def to_yaml(self) -> str:
        """The description as the text of a cluster file."""
        from hyperparallel.cluster import files

        return files.to_yaml(self)

    @staticmethod
    def from_yaml(text: str) -> Cluster:
        """Read the text of a cluster file (YAML or JSON); a `ClusterError` names the field that is wrong."""
        from hyperparallel.cluster import files

        return files.from_yaml(text)

    @staticmethod
    def load(source: str | Path, devices: int | None = None) -> Cluster:
        """Read a cluster file, or take a preset by name; `devices` resizes it."""
        from hyperparallel.cluster import files

        return files.load(source, devices)


def _refuse_twins(field: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(field, name, "each name once")
