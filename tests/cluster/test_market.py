"""Cluster files beyond what is sold or announced are refused; what is sold or announced is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperparallel.cluster import Cluster, Device, Fabric, Tier
from hyperparallel.cluster.files import cluster_yaml, parse_cluster
from hyperparallel.cluster.presets import PRESETS, preset
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure
GPUS = [name for name in PRESETS if name != "laptop"]


def read(cluster: Cluster) -> Cluster:
    """What a file of that machine gives; in Python, any machine can be built."""
    return parse_cluster(cluster_yaml(cluster))


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
        ("h100", "ethernet", 400e9, "50e9"),
        ("a100", "roce", 200e9, "25e9"),
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
        ("gb300-nvl72", "nic", 300e9),  # AMD Helios, announced: 2.4 Tb/s
        ("h100", "roce", 525e9),  # Intel Gaudi 3: 21 ports of 200 Gb/s
        ("b200", "ethernet", 1.4e12),  # Microsoft Maia 200
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


def with_memory(capacity: float, rate: float, link: float = 50e9, host: bool = True) -> Cluster:
    """A machine with that memory, and with that scale-up link between eight devices."""
    memory = (Tier("device", capacity, rate, rate), Tier("host", 2e12, 55e9, 55e9))
    fabric = (Fabric("scale-up", "switch", (8,), link, 1e-6),)
    return Cluster("m", Device("d", {"bf16": 1e14}, rate), memory if host else memory[:1], fabric)


MEMORIES = {
    "A100 40 GB": (40e9, 1.555e12),
    "A100 80 GB": (80e9, 2.039e12),
    "H100": (80e9, 3.35e12),
    "H200": (141e9, 4.8e12),
    "B200": (180e9, 7.7e12),
    "GB200": (186e9, 8e12),
    "B300": (288e9, 8e12),
    "Rubin, announced": (288e9, 22e12),
    "Rubin Ultra, announced": (1e12, 32e12),
    "Rubin CPX, announced": (128e9, 2e12),
    "RTX 5090": (32e9, 1.792e12),
    "RTX PRO 6000": (96e9, 1.792e12),
    "MI300X": (192e9, 5.3e12),
    "MI325X": (256e9, 6e12),
    "MI355X": (288e9, 8e12),
    "MI455X, announced": (432e9, 23.3e12),
    "TPU v5p": (95 * 2**30, 2.765e12),
    "TPU v6e": (32 * 2**30, 1.64e12),
    "TPU7x": (192 * 2**30, 7.38e12),
    "Trainium2": (96 * 2**30, 2.9e12),
    "Trainium3": (144 * 2**30, 4.9e12),
    "Gaudi 3": (128e9, 3.7e12),
    "Maia 200": (216e9, 7e12),
    "Ascend 910B": (64 * 2**30, 1.6e12),
    "Ascend 910C": (128 * 2**30, 3.2e12),
    "Ascend 950PR": (128e9, 1.6e12),
    "Ascend 950DT": (96e9, 4e12),
    "Ascend 960DT, announced": (288e9, 9.6e12),
    "Ascend 960PR, announced": (192e9, 2.4e12),
    "Ascend 970, announced": (288e9, 14.4e12),
    "Ascend 980, announced": (384e9, 38.4e12),
}
"""Bytes, and bytes per second, of devices faster than CPUs."""


@pytest.mark.parametrize("name", MEMORIES)
def test_devices_that_are_sold_or_announced_are_taken_and_nodes_of_them_are_not(name: str) -> None:
    capacity, rate = MEMORIES[name]
    machine = with_memory(capacity, rate)
    assert read(machine) == machine
    with pytest.raises(ClusterError, match=r"memory\.device\.capacity_bytes: .* not of a node"):
        read(with_memory(8 * capacity, rate))
    with pytest.raises(ClusterError, match=r"(memory_bytes_s|read_bytes_s): .* of one device"):
        read(with_memory(capacity, 8 * rate))


@pytest.mark.parametrize(
    ("capacity", "rate"),
    [
        (16e9, 0.9e12),  # NVIDIA V100
        (24e9, 1.008e12),  # GeForce RTX 4090
        (48e9, 0.864e12),  # NVIDIA L40S
        (16 * 2**30, 0.82e12),  # TPU v5e
        (32 * 2**30, 1.228e12),  # TPU v4
        (112e9, 1.4e12),  # Ascend 950PR as Atlas 350
        (512e9, 819e9),  # Apple M3 Ultra
        (4e12, 0.6e12),  # a server's CPUs as one device
        (4e12, 1.6e12),  # AMD EPYC Venice, announced
    ],
)
@pytest.mark.parametrize("host", [True, False])
def test_slower_memory_may_have_any_size(capacity: float, rate: float, host: bool) -> None:
    machine = with_memory(capacity, rate, host=host and rate < 1.5e12)
    assert read(machine) == machine


@pytest.mark.parametrize(
    ("memory", "link"),
    [
        ("TPU v6e", 400e9),
        ("Trainium3", 1.28e12),
        ("Ascend 950DT", 1.008e12),
        ("Rubin, announced", 1.8e12),
        ("MI455X, announced", 1.8e12),
        ("Ascend 970, announced", 2.2e12),
        ("Ascend 980, announced", 4e12),
    ],
)
def test_scale_up_links_are_taken_in_bytes_and_refused_in_bits(memory: str, link: float) -> None:
    capacity, rate = MEMORIES[memory]
    machine = with_memory(capacity, rate, link)
    assert read(machine) == machine
    with pytest.raises(ClusterError, match=r"fabric\.scale-up\.bytes_s: "):
        read(with_memory(capacity, rate, 8 * link))


def test_a_link_in_bits_beside_memory_that_is_faster_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"at most 2e\+12 bytes/s beside that memory.*write 450e9"):
        read(with_memory(*MEMORIES["H200"], 3.6e12))


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
