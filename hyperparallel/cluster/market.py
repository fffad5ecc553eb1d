"""What is neither sold nor announced: the sign of bits taken for bytes, or of a node taken for a device.

Checked where a file is read, since that is where such slips are made; a machine that nobody sells can still
be built in Python.

    networks  adapters are sold by the bit: at most `_MOST_NETWORK` a device (AMD Helios: 43 TB/s both ways of
              72 devices), and at most `_OVER_HOST` times what the device's port to its host carries, since
              both are the same kind of port (1.8 on HGX B300, the most of all presets). Ethernet also joins
              devices without adapters (Intel Gaudi 3 documentation: 21 ports of 200 Gb/s, 525 GB/s; Microsoft
              Maia 200: 1.4 TB/s), so of it only the rate of one port is refused
    links     at most `_MOST_LINK`, or `_LINK_SHARE` of the rate of memory: 0.15 on the Ascend 970, 0.1 on the
              Ascend 980 (Huawei Connect 2026: 2.2 and 4 TB/s each way)
    memory    of a fast device can be read at least `_LEAST_READS` times a second: 12.5 on the Ascend 950PR
              (1.6 TB/s of 128 GB), 20 to 55 on most. Memory faster than all that is sold (8 TB/s) holds at
              least `_LEAST_FASTER`, and is read at most `_MOST_READS` times: 76 on the NVIDIA Rubin (22 TB/s
              of 288 GB), 100 on the Ascend 980. A device and its own memory tier state one rate

A tier counts as a network by its name, and outside another tier by a rate that is an adapter's in bits. Below
`_FAST` bytes per second memory is that of CPUs and workstations, which have any capacity; below `_FAST_HOST`
too, where no host tier stands beside it (AMD EPYC Venice: 1.6 TB/s a socket). Not caught: GiB for GB (7 %),
eight times the rate of memory below 1.25 TB/s, and of Ethernet, several ports in bits.
"""

from __future__ import annotations

import re

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.contradictions import in_bits
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.errors import ClusterError

_ADAPTERS = re.compile(r"infiniband|rdma|slingshot|omni-?path|(^|[-_ ])(ib|nic|efa|dcn)([-_ \d]|$)")
_ETHERNET = re.compile(r"ethernet|roce")
_MOST_NETWORK = 300e9
_PORT_RATES = (100e9, 200e9)
_LINE_RATES = (400e9, 800e9, 1600e9)
"""Bits per second of one adapter; no scale-up link between groups of devices moves just as many bytes."""

_OVER_HOST = 4.0
_MOST_LINK, _LINK_SHARE = 2e12, 0.25
_FAST, _FAST_HOST, _LEAST_READS = 1.5e12, 1.8e12, 8.0
_FASTER_THAN_SOLD, _LEAST_FASTER, _MOST_READS = 10e12, 200e9, 160.0
_MOST_FAST = 1.1e12
"""Bytes of one device: NVIDIA announced 1 TB for Rubin Ultra."""

_ESCAPE = "if more is meant, build the Cluster in Python"


def check_market(cluster: Cluster) -> None:
    """Raise `ClusterError` for a link or a device's memory that is beyond what is sold or announced."""
    for index, link in enumerate(cluster.fabric):
        if _is_network(link, index > 0):
            _check_network(cluster, link)
        _check_link(cluster, link)
    own, device = cluster.memory[0], cluster.device
    if device.threads is None:
        fast = _FAST if cluster.has_tier("host") else _FAST_HOST
        _check_memory("device.memory_bytes_s", device.memory_bytes_s, own.capacity_bytes, fast)
        _check_memory("memory.device.read_bytes_s", own.read_bytes_s, own.capacity_bytes, fast)
    if not 0.5 <= own.read_bytes_s / device.memory_bytes_s <= 2.0:
        allowed = f"about device.memory_bytes_s, {device.memory_bytes_s:.4g} bytes/s: it is the same memory"
        raise ClusterError("memory.device.read_bytes_s", own.read_bytes_s, allowed, "one rate in both places")


def _is_network(link: Fabric, outside: bool) -> bool:
    name = link.name.lower()
    if link.kind != "switch":
        return False
    if _ETHERNET.search(name):
        return link.bytes_s in _PORT_RATES + _LINE_RATES
    return _ADAPTERS.search(name) is not None or (outside and link.bytes_s in _LINE_RATES)


def _check_network(cluster: Cluster, link: Fabric) -> None:
    field = f"fabric.{link.name}.bytes_s"
    if link.bytes_s > _MOST_NETWORK:
        allowed = f"at most {_MOST_NETWORK:.4g} bytes/s of a network (2.4 Tb/s a device; {_ESCAPE})"
        raise ClusterError(field, link.bytes_s, allowed, in_bits(link.bytes_s))
    host = cluster.tier("host").read_bytes_s if cluster.has_tier("host") else link.bytes_s
    if link.bytes_s > _OVER_HOST * host:
        allowed = f"at most {_OVER_HOST:g} times what memory.host gives, {host:.4g} bytes/s ({_ESCAPE})"
        raise ClusterError(field, link.bytes_s, allowed, in_bits(link.bytes_s))


def _check_link(cluster: Cluster, link: Fabric) -> None:
    most = max(_MOST_LINK, _LINK_SHARE * cluster.device.memory_bytes_s)
    if link.bytes_s > most:
        allowed = f"at most {most:.4g} bytes/s beside that memory ({_ESCAPE})"
        raise ClusterError(f"fabric.{link.name}.bytes_s", link.bytes_s, allowed, in_bits(link.bytes_s))


def _check_memory(field: str, rate: float, capacity: float, fast: float) -> None:
    """Refuse a device's memory that is too fast, or too large for its speed."""
    large = capacity >= _LEAST_FASTER
    most = max(_FASTER_THAN_SOLD, _MOST_READS * capacity) if large else _FASTER_THAN_SOLD
    if rate > most:
        allowed = f"at most {most:.4g} bytes/s with {capacity / 1e9:,.4g} GB ({_ESCAPE})"
        raise ClusterError(field, rate, allowed, "bytes per second of one device (3.35 TB/s is 3.35e12)")
    most = min(_MOST_FAST, rate / _LEAST_READS)
    if rate >= fast and capacity > most:
        allowed = f"at most {most:.4g} bytes on one device with {rate / 1e12:.4g} TB/s ({_ESCAPE})"
        hint = "the bytes of one device, not of a node (80 GB is 80e9)"
        raise ClusterError("memory.device.capacity_bytes", capacity, allowed, hint)
