"""What is possible alone but not side by side: links, memory tiers and a device that contradict one another.

Holds for every description, also of machines that nobody sells; what is sold is in `market.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyperparallel.cluster.device import Device
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import EXAMPLE_MEMORY, Tier
from hyperparallel.errors import ClusterError


def check_links(device: Device, fabric: Sequence[Fabric]) -> None:
    """Raise `ClusterError` for a fabric tier that is faster than memory, or that shares an unknown one."""
    names = {tier.name for tier in fabric}
    for link in fabric:
        if link.bytes_s > device.memory_bytes_s:
            allowed = f"at most the device's memory bandwidth, {device.memory_bytes_s:.4g} bytes/s"
            raise ClusterError(f"fabric.{link.name}.bytes_s", link.bytes_s, allowed, in_bits(link.bytes_s))
        if link.shares is not None and link.shares not in names - {link.name}:
            allowed = f"another fabric tier: {', '.join(names)}"
            raise ClusterError(f"fabric.{link.name}.shares", link.shares, allowed)


def in_bits(rate: float) -> str:
    """What to write for a rate that was given in bits.

    >>> in_bits(400e9)
    '50e9 (400 Gb/s is 50e9 bytes/s)'
    """
    meant = f"{rate / 8e9:.4g}e9"
    return f"{meant} ({rate / 1e9:,.4g} Gb/s is {meant} bytes/s)"


def check_memory(memory: Sequence[Tier]) -> None:
    """Raise `ClusterError` where the device's own memory is missing, or tiers contradict it."""
    names = [tier.name for tier in memory]
    if "device" not in names:
        allowed = "a tier named device, the device's own memory"
        raise ClusterError("memory", names, allowed, f"{EXAMPLE_MEMORY} as the first tier")
    if names[0] != "device":
        raise ClusterError("memory", names, "the tier named device first", f"device before {names[0]}")
    own = memory[0]
    for tier in memory[1:]:
        if tier.read_bytes_s > own.read_bytes_s:
            allowed = f"at most that of the device's own memory, {own.read_bytes_s:.4g} bytes/s"
            hint = f"what one device reads from {tier.name}, in bytes per second"
            raise ClusterError(f"memory.{tier.name}.read_bytes_s", tier.read_bytes_s, allowed, hint)
