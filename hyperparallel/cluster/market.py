"""What is neither sold nor announced: the sign of bits taken for bytes, or of a node taken for a device.

Checked where a file is read, since that is where such slips are made; a machine that nobody sells can still
be built in Python.

    networks  adapters are sold by the bit: at most 1.6 Tb/s a device (NVIDIA ConnectX-9), and at most
              `_OVER_HOST` times what the device's port to its host carries, since both are the same kind of
              port (1.8 on HGX B300, the most of all presets)
    memory    of a fast device can be read at least `_LEAST_READS` times a second: 12.5 on the Ascend 950PR
              (1.6 TB/s of 128 GB), 20 to 45 on most. Memory faster than all that is sold (8 TB/s) at most
              `_MOST_READS` times: 76 on the NVIDIA Rubin (announced: 22 TB/s of 288 GB). A device and its own
              memory tier state one rate

A tier counts as a network by its name, and outside another tier by a rate that is an adapter's in bits. Below
`_FAST` bytes per second memory is that of CPUs and workstations, which have any capacity.
"""

from __future__ import annotations

import re

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.contradictions import in_bits
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.errors import ClusterError

_NETWORKS = re.compile(r"infiniband|ethernet|roce|rdma|slingshot|(^|[-_ ])(ib|nic|efa|dcn)([-_ \d]|$)")
_MOST_NETWORK = 200e9
_LINE_RATES = (400e9, 800e9, 1600e9)
"""Bits per second of one adapter; no scale-up link between groups of devices moves just as many bytes."""

_OVER_HOST = 4.0
_FAST, _LEAST_READS = 1.5e12, 8.0
_FASTER_THAN_SOLD, _MOST_READS = 10e12, 160.0
_MOST_FAST = 1.1e12
"""Bytes of one device: NVIDIA announced 1 TB for Rubin Ultra."""

_ESCAPE = "if more is meant, build the Cluster in Python"


def check_market(cluster: Cluster) -> None:
    """Raise `ClusterError` for a network or a device's memory that is beyond what is sold or announced."""
    for index, link in enumerate(cluster.fabric):
        named = _NETWORKS.search(link.name.lower()) is not None
        if link.kind == "switch" and (named or (index > 0 and link.bytes_s in _LINE_RATES)):
            _check_network(cluster, link)
    own, device = cluster.memory[0], cluster.device
    if device.threads is None:
        _check_memory("device.memory_bytes_s", device.memory_bytes_s, own.capacity_bytes)
        _check_memory("memory.device.read_bytes_s", own.read_bytes_s, own.capacity_bytes)
    if not 0.5 <= own.read_bytes_s / device.memory_bytes_s <= 2.0:
        allowed = f"about device.memory_bytes_s, {device.memory_bytes_s:.4g} bytes/s: it is the same memory"
        raise ClusterError("memory.device.read_bytes_s", own.read_bytes_s, allowed, "one rate in both places")


def _check_network(cluster: Cluster, link: Fabric) -> None:
    field = f"fabric.{link.name}.bytes_s"
    if link.bytes_s > _MOST_NETWORK:
        allowed = f"at most {_MOST_NETWORK:.4g} bytes/s of a network (1.6 Tb/s a device; {_ESCAPE})"
        raise ClusterError(field, link.bytes_s, allowed, in_bits(link.bytes_s))
    host = cluster.tier("host").read_bytes_s if cluster.has_tier("host") else link.bytes_s
    if link.bytes_s > _OVER_HOST * host:
        allowed = f"at most {_OVER_HOST:g} times what memory.host gives, {host:.4g} bytes/s ({_ESCAPE})"
        raise ClusterError(field, link.bytes_s, allowed, in_bits(link.bytes_s))


def _check_memory(field: str, rate: float, capacity: float) -> None:
    """Refuse a device's memory that is too fast, or too large for its speed."""
    most = max(_FASTER_THAN_SOLD, _MOST_READS * capacity)
    if rate > most:
        allowed = f"at most {most:.4g} bytes/s with {capacity / 1e9:,.4g} GB ({_ESCAPE})"
        raise ClusterError(field, rate, allowed, "bytes per second of one device (3.35 TB/s is 3.35e12)")
    most = min(_MOST_FAST, rate / _LEAST_READS)
    if rate >= _FAST and capacity > most:
        allowed = f"at most {most:.4g} bytes on one device with {rate / 1e12:.4g} TB/s ({_ESCAPE})"
        hint = "the bytes of one device, not of a node (80 GB is 80e9)"
        raise ClusterError("memory.device.capacity_bytes", capacity, allowed, hint)
