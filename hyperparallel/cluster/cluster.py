"""A whole machine: one kind of device, its memory tiers, and the fabric tiers that connect devices.

Fabric tiers stand innermost first, each connecting whole groups of the tier inside it; the number of
devices is the product of all their sizes. Tiers of size 1 stay in the description, so that `resized` knows
what a larger machine of the same kind would be connected with.

Left out: mixed kinds of device in one machine, failed links, and traffic of other jobs.
Files are read and written in `files.py`, machines that are known by name are in `presets/`, either is found
by `load_cluster`, and what the layout solver is priced with is `sustained_rates`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hyperparallel.cluster import bounds
from hyperparallel.cluster.contradictions import check_links, check_memory
from hyperparallel.cluster.device import Device
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier
from hyperparallel.cluster.resize import resized_fabric
from hyperparallel.errors import ClusterError, nearest


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


def _refuse_twins(field: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(field, name, "each name once")
