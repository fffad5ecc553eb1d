"""What is possible alone but not side by side: the sign of bits taken for bytes, or of a node for a device.

    links     no faster than the device's memory
    networks  adapters are sold by the bit: at most 1.6 Tb/s a device (NVIDIA ConnectX-9), and at most
              `_OVER_HOST` times what the device's port to its host carries, since both are the same kind of
              port (1.8 on HGX B300, the most of all presets)
    memory    of a fast device is read `_LEAST_READS` to `_MOST_READS` times a second: 12.5 (Ascend 950PR,
              1.6 TB/s of 128 GB) to 76 (NVIDIA Rubin, 22 TB/s of 288 GB) on what is sold or announced, 24 to
              45 on most

A tier counts as a network by its name, and outside another tier by a rate that is an adapter's in bits. Below
`_FAST` bytes per second memory is that of CPUs and workstations, which have any capacity.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hyperparallel.cluster.device import Device
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.tiers import EXAMPLE_MEMORY, Tier
from hyperparallel.errors import ClusterError

_NETWORKS = re.compile(r"infiniband|ethernet|roce|rdma|slingshot|(^|[-_ ])(ib|nic|efa|dcn)([-_ \d]|$)")
_MOST_NETWORK = 200e9
_LINE_RATES = (400e9, 800e9, 1600e9)
"""Bits per second of one adapter; no scale-up link moves just as many bytes."""

_OVER_HOST = 4.0
_FAST, _LEAST_READS, _MOST_READS = 1.5e12, 8.0, 160.0
_MOST_FAST = 1.1e12
"""Bytes of one device: NVIDIA announced 1 TB for Rubin Ultra."""


def check_links(device: Device, memory: Sequence[Tier], fabric: Sequence[Fabric]) -> None:
    """Raise `ClusterError` for a fabric tier that is faster than its kind, or that shares an unknown one."""
    names = {tier.name for tier in fabric}
    host = next((tier for tier in memory if tier.name == "host"), None)
    for index, link in enumerate(fabric):
        if link.bytes_s > device.memory_bytes_s:
            allowed = f"at most the device's memory bandwidth, {device.memory_bytes_s:.4g} bytes/s"
            raise ClusterError(f"fabric.{link.name}.bytes_s", link.bytes_s, allowed, _bits(link))
        if link.shares is not None and link.shares not in names - {link.name}:
            allowed = f"another fabric tier: {', '.join(names)}"
            raise ClusterError(f"fabric.{link.name}.shares", link.shares, allowed)
        _check_network(link, index, host)


def _check_network(link: Fabric, index: int, host: Tier | None) -> None:
    named = _NETWORKS.search(link.name.lower()) is not None
    if link.kind != "switch" or not (named or (index > 0 and link.bytes_s in _LINE_RATES)):
        return
    if link.bytes_s > _MOST_NETWORK:
        allowed = f"at most {_MOST_NETWORK:.4g} bytes/s of a network (1.6 Tb/s a device)"
        raise ClusterError(f"fabric.{link.name}.bytes_s", link.bytes_s, allowed, _bits(link))
    if host is not None and link.bytes_s > _OVER_HOST * host.read_bytes_s:
        allowed = f"at most {_OVER_HOST:g} times what memory.host gives, {host.read_bytes_s:.4g} bytes/s"
        raise ClusterError(f"fabric.{link.name}.bytes_s", link.bytes_s, allowed, _bits(link))


def _bits(link: Fabric) -> str:
    """What a rate would be if it had been given in bits."""
    meant = f"{link.bytes_s / 8e9:.4g}e9"
    return f"{meant} ({link.bytes_s / 1e9:,.4g} Gb/s is {meant} bytes/s)"


def check_memory(device: Device, memory: Sequence[Tier]) -> None:
    """Raise `ClusterError` where the device's own memory is missing, or no memory has such numbers."""
    names = [tier.name for tier in memory]
    if "device" not in names:
        allowed = "a tier named device, the device's own memory"
        raise ClusterError("memory", names, allowed, f"{EXAMPLE_MEMORY} as the first tier")
    if names[0] != "device":
        raise ClusterError("memory", names, "the tier named device first", f"device before {names[0]}")
    own = memory[0]
    if device.threads is None:
        _check_own("device.memory_bytes_s", device.memory_bytes_s, own)
        _check_own("memory.device.read_bytes_s", own.read_bytes_s, own)
    if not 0.5 <= own.read_bytes_s / device.memory_bytes_s <= 2.0:
        allowed = f"about device.memory_bytes_s, {device.memory_bytes_s:.4g} bytes/s: it is the same memory"
        raise ClusterError("memory.device.read_bytes_s", own.read_bytes_s, allowed)
    for tier in memory[1:]:
        if tier.read_bytes_s > own.read_bytes_s:
            allowed = f"at most that of the device's own memory, {own.read_bytes_s:.4g} bytes/s"
            hint = f"what one device reads from {tier.name}, in bytes per second"
            raise ClusterError(f"memory.{tier.name}.read_bytes_s", tier.read_bytes_s, allowed, hint)


def _check_own(field: str, rate: float, own: Tier) -> None:
    """Refuse a fast memory that is read too often or too seldom in a second."""
    if rate < _FAST:
        return
    capacity = own.capacity_bytes
    if rate > _MOST_READS * capacity:
        allowed = f"at most {_MOST_READS * capacity:.4g} bytes/s of {capacity / 1e9:,.4g} GB on one device"
        raise ClusterError(field, rate, allowed, "bytes per second of one device (3.35 TB/s is 3.35e12)")
    most = min(_MOST_FAST, rate / _LEAST_READS)
    if capacity > most:
        allowed = f"at most {most:.4g} bytes on one device with {rate / 1e12:.4g} TB/s"
        hint = "the bytes of one device, not of a node (80 GB is 80e9)"
        raise ClusterError("memory.device.capacity_bytes", capacity, allowed, hint)
