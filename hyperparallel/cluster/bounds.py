"""What no machine reaches: bounds that catch a wrong unit before anything is priced with it.

Bits taken for bytes, gigabytes written as bytes, microseconds written as seconds: each is a factor of 8
to 10^9, and each gives a plan that looks right. These bounds hold for every machine, so they catch a factor
of 8 only at the top of a range: 400 Gb/s written as 400e9 is the speed of an NVLink, and passes here. Tiers
are compared with one another in `contradictions.py`, and with what is sold in `market.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyperparallel.errors import ClusterError


@dataclass(frozen=True)
class Bound:
    """Lowest and highest believable value, and the likely mistake below and above them."""

    low: float
    high: float
    unit: str
    below: str
    above: str


_DECIMAL = "the value is in bytes: 80 GB is 80e9"
_BITS = "links are sold in bits: 400 Gb/s is 50e9 bytes per second"

PEAK = Bound(1e8, 2e17, "FLOP/s", "989 TFLOP/s is 989e12", "dense FLOP/s of one device, not of a node or pod")
"""NVIDIA announced 100 PFLOP/s of fp4 for Rubin Ultra, the most of all devices."""

_OF_DEVICE = "bandwidth is of one device, in bytes: 3.35 TB/s is 3.35e12"
MEMORY_RATE = Bound(1e7, 40e12, "bytes/s", "3.35 TB/s is 3.35e12", _OF_DEVICE)
"""NVIDIA announced 32 TB/s for Rubin Ultra, Huawei 38.4 TB/s for the Ascend 980: the most with HBM."""

SHARED_RATE = Bound(1e7, 1e15, "bytes/s", "440 GB/s is 440e9", "bandwidth is of one host's devices, in bytes")
_OF_TIER = "capacity is in bytes, of one tier of one host at most"
CAPACITY = Bound(1e9, 100e12, "bytes", _DECIMAL, _OF_TIER)
STORAGE = Bound(1e9, 4e15, "bytes", _DECIMAL, _OF_TIER)
"""What is neither a device's nor a host's memory: 32 SSDs of 122.88 TB (Solidigm D5-P5336)."""

TIER_RATE = Bound(1e6, 10e12, "bytes/s", "55 GB/s is 55e9", "bandwidth is towards one device, in bytes")
LINK_RATE = Bound(1e6, 6e12, "bytes/s", "50 GB/s is 50e9", _BITS)
"""Huawei announced 4 TB/s each way for the Ascend 980; NVLink 5 in bits is 7.2e12."""

LATENCY = Bound(0.0, 0.1, "seconds", "a time is not negative", "5 microseconds are 5e-6")


MOST_DEVICES = 10**7
"""Ten times the largest machines that are announced; beyond, no rate of the model has been looked at."""

MOST_WORDS = f"at most {MOST_DEVICES:,} devices"


def check_bounds(field: str, value: float, bound: Bound) -> None:
    """Raise `ClusterError` with the likely mistake when `value` lies outside `bound`.

    >>> check_bounds("memory.device.capacity_bytes", 80, CAPACITY)
    Traceback (most recent call last):
    hyperparallel.errors.ClusterError: memory.device.capacity_bytes: got 80; allowed: 1e+09 to 1e+14
    bytes; write the value in that unit (the value is in bytes: 80 GB is 80e9) instead
    """
    if bound.low <= value <= bound.high:
        return
    hint = bound.below if value < bound.low else bound.above
    allowed = f"{bound.low:.4g} to {bound.high:.4g} {bound.unit}"
    raise ClusterError(field, value, allowed, f"the value in that unit ({hint})")


def check_fraction(field: str, value: float) -> None:
    """Raise `ClusterError` unless 0 < value <= 1.

    >>> check_fraction("device.gemm.peak", 0.85)
    """
    if not 0 < value <= 1:
        raise ClusterError(field, value, "more than 0, at most 1")


def check_count(field: str, value: float, least: int = 1) -> None:
    """Raise `ClusterError` unless value >= least.

    >>> check_count("memory.host.shared_by", 8)
    """
    if value < least:
        raise ClusterError(field, value, f"at least {least}")
