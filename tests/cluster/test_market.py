"""Cluster files beyond what is sold or announced are refused; what is sold or announced is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperparallel.cluster import Cluster, Device, Tier
from hyperparallel.cluster.presets import PRESETS, preset
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure
GPUS = [name for name in PRESETS if name != "laptop"]


def read(cluster: Cluster) -> Cluster:
    """What a file of that machine gives; in Python, any machine can be built."""
    return Cluster.from_yaml(cluster.to_yaml())


def with_network(cluster: Cluster, name: str, bytes_s: float) -> Cluster:
    outer = replace(cluster.fabric[-1], name=name, bytes_s=bytes_s)
    return read(replace(cluster, fabric=(*cluster.fabric[:-1], outer)))


def with_own(cluster: Cluster, capacity: float = 1.0, rate: float = 1.0) -> Cluster:
    """The machine with multiples of a device's capacity and bandwidth."""
    own, device = cluster.memory[0], cluster.device
    tier = replace(
        own,
        capacity_bytes=own.capacity_bytes * capacity,
        read_bytes_s=own.read_bytes_s * rate,
        write_bytes_s=own.write_bytes_s * rate,
    )
    faster = replace(device, memory_bytes_s=device.memory_bytes_s * rate)
    return read(replace(cluster, device=faster, memory=(tier, *cluster.memory[1:])))


@pytest.mark.parametrize(
    ("machine", "name", "bytes_s", "meant"),
    [
        ("h100", "infiniband", 400e9, "50e9 (400 Gb/s is 50e9 bytes/s)"),
        ("h100", "roce", 400e9, "50e9"),
        ("h100", "ib-rail", 300e9, "37.5e9"),
        ("h100", "scale-out", 400e9, "50e9"),
        ("b300", "net", 800e9, "100e9"),
        ("a100", "infiniband", 200e9, "25e9"),
        ("gb200-nvl72", "infiniband", 400e9, "50e9"),
    ],
)
def test_a_network_in_bits_is_refused(machine: str, name: str, bytes_s: float, meant: str) -> None:
    with pytest.raises(ClusterError) as caught:
        with_network(preset(machine, 144), name, bytes_s)
    assert caught.value.field == f"fabric.{name}.bytes_s" and f"write {meant}" in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "name", "bytes_s"),
    [
        ("h100", "nvlink-switch", 450e9),  # NVLink Switch System: 256 H100
        ("gb200-nvl72", "nvlink-rack", 900e9),
        ("b300", "infiniband", 100e9),
        ("gb300-nvl72", "infiniband", 200e9),  # ConnectX-9: 1.6 Tb/s
    ],
)
def test_fast_outer_links_that_are_sold_are_taken(machine: str, name: str, bytes_s: float) -> None:
    assert with_network(preset(machine), name, bytes_s).fabric[-1].bytes_s == bytes_s


@pytest.mark.parametrize("name", GPUS)
def test_eight_times_the_bandwidth_or_capacity_of_any_machine_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match=r"(memory_bytes_s|read_bytes_s): .* of one device"):
        with_own(preset(name), rate=8.0)
    with pytest.raises(ClusterError, match=r"memory\.device\.capacity_bytes: .* not of a node"):
        with_own(preset(name), capacity=8.0)


@pytest.mark.parametrize(
    ("capacity", "rate"),
    [
        (288e9, 22e12),  # NVIDIA Rubin, announced
        (1e12, 32e12),  # NVIDIA Rubin Ultra, announced
        (432e9, 19.6e12),  # AMD MI450, announced
        (128e9, 1.6e12),  # Ascend 950PR
        (128e9, 2e12),  # NVIDIA Rubin CPX, announced
        (10e9, 760e9),  # GeForce RTX 3080
        (512e9, 819e9),  # Apple M3 Ultra
        (4e12, 0.6e12),  # a server's CPUs as one device
    ],
)
def test_devices_that_are_sold_or_announced_are_taken(capacity: float, rate: float) -> None:
    device = Device("d", {"bf16": 1e14}, rate)
    machine = Cluster("m", device, (Tier("device", capacity, rate, rate),), ())
    assert read(machine) == machine


def test_part_of_a_memory_may_be_described() -> None:
    h100 = preset("h100")
    part = replace(h100, memory=(replace(h100.memory[0], capacity_bytes=10e9), *h100.memory[1:]))
    assert read(part) == part


def test_both_rates_of_the_own_memory_must_agree() -> None:
    h100 = preset("h100")
    slow = replace(h100.memory[0], read_bytes_s=0.4e12)
    with pytest.raises(ClusterError, match=r"memory\.device\.read_bytes_s: .*about device\.memory_bytes_s"):
        read(replace(h100, memory=(slow, *h100.memory[1:])))


def test_the_rate_of_the_two_that_is_too_high_is_named() -> None:
    h100 = preset("h100")
    fast, tier = replace(h100.device, memory_bytes_s=26.8e12), replace(h100.memory[0], read_bytes_s=26.8e12)
    with pytest.raises(ClusterError, match=r"^device\.memory_bytes_s: got 26800000000000"):
        read(replace(h100, device=fast))
    with pytest.raises(ClusterError, match=r"^memory\.device\.read_bytes_s: got 26800000000000"):
        read(replace(h100, memory=(tier, *h100.memory[1:])))


def test_any_machine_can_be_built_in_python() -> None:
    h100 = preset("h100", 16)
    fast = replace(h100.fabric[1], bytes_s=400e9)
    assert replace(h100, fabric=(h100.fabric[0], fast)).link("infiniband").bytes_s == 400e9
