"""UB-Mesh: racks and pods wired as full meshes in four dimensions, and the Atlas SuperPoDs built like it.

UB-Mesh (arXiv 2503.20377): a device has 72 Unified Bus lanes of 112 Gb/s (14 GB/s each way). 56 go to the
14 others of its row and column in the 8 x 8 rack, 4 lanes each; 16 go up. The 1,024 uplink lanes of a rack
are read here as 128 to each of the 6 neighbours in its pod's 4 x 4 mesh of racks and 256 to the Clos between
pods, that is 12 and 4 lanes a device (inferred; it is the split that uses all of them).

Atlas 950: 8,192 devices in 128 compute cabinets, so 64 a cabinet, and 2 TB/s both ways per device, which
72 such lanes are: taken as UB-Mesh with 8 pods. Atlas 960: 15,488 in 176 compute cabinets, 88 each, taken
as racks of 8 x 11 and 11 pods, with lanes faster in proportion (inferred). Both as announced in 2025, not
measured; what Huawei sells and announced since is in their notes.

Peaks are of the matrix units; Huawei's totals add the vector units, and its keynote rounds up.
"""

from __future__ import annotations

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier
from hyperparallel.cluster.presets.ascend import ASCEND_GEMM, COMM_SLOWDOWN

LANE_BYTES_S = 112e9 / 8
"""One Unified Bus lane, each way."""

RACK_LANES, POD_LANES, CLOS_LANES = 14 * 4, 12, 4
"""Lanes of one device inside its rack, to the other racks of its pod, and to other pods."""

_PAPER = "UB-Mesh, arXiv 2503.20377"
_KEYNOTE = "Huawei Connect 2025, Eric Xu's keynote"
_WHITE_PAPER = "Huawei, Ascend 950 NPU architecture white paper (2026), table 3-1"

ASCEND_950DT = Device(
    name="ascend-950dt",
    peak_flop_s={
        "bf16": 432e12,
        "fp16": 432e12,
        "fp8": 865e12,
        "mxfp8": 865e12,
        "mxfp4": 1730e12,
        "tf32": 216e12,
        "fp32": 27e12,
        "int8": 865e12,
    },
    memory_bytes_s=4e12,
    launch_s=5e-6,
    units=32,
    comm_slowdown=COMM_SLOWDOWN,
    gemm=ASCEND_GEMM,
    source=f"{_WHITE_PAPER}: 32 of 36 cores, as in the Atlas 950 that is sold; fp32 of the vector units; "
    "144 GB at 4 TB/s; launch, gemm and slowdown inferred from the 910C",
)

ASCEND_960 = Device(
    name="ascend-960",
    peak_flop_s={
        "bf16": 1e15,
        "fp16": 1e15,
        "fp8": 2e15,
        "mxfp8": 2e15,
        "mxfp4": 4e15,
    },
    memory_bytes_s=9.6e12,
    launch_s=5e-6,
    units=32,
    comm_slowdown=COMM_SLOWDOWN,
    gemm=ASCEND_GEMM,
    source=f"{_KEYNOTE}: 2 PFLOP/s fp8, 4 fp4, 288 GB at 9.6 TB/s; bf16 inferred as half of fp8; units, "
    "launch, gemm and slowdown inferred from the 950DT",
)


def ub_mesh(pods: int = 1, name: str = "ub-mesh-1024") -> Cluster:
    """UB-Mesh with pods of 1,024 devices; several pods are joined by a Clos of high-radix switches."""
    notes = (
        "The paper does not name its device; an Ascend 950DT is assumed, whose 2 TB/s the 72 lanes match.",
        "Split of uplink lanes between pod mesh and Clos is inferred.",
    )
    fabric = _fabric((8, 8), pods, LANE_BYTES_S, _PAPER)
    return Cluster(name, ASCEND_950DT, _memory(ASCEND_950DT, 144e9), fabric, notes)


def ub_mesh_1024() -> Cluster:
    """One UB-Mesh pod: 4 x 4 racks of 8 x 8."""
    return ub_mesh(1, "ub-mesh-1024")


def ub_mesh_8192() -> Cluster:
    """UB-Mesh SuperPod: 8 pods of 1,024."""
    return ub_mesh(8, "ub-mesh-8192")


def atlas950() -> Cluster:
    """Atlas 950 SuperPoD: 8,192 Ascend 950DT, announced for the end of 2026."""
    notes = (
        "Announced, not measured. Topology inferred from UB-Mesh and from 128 compute cabinets.",
        "Sold (Huawei's product page, 2026): up to 1,024 devices, with 96 GB and 1.68 TB/s both ways each.",
    )
    source = f"{_KEYNOTE}: 2 TB/s both ways per device, 16.3 PB/s in all; lanes as in {_PAPER}"
    fabric = _fabric((8, 8), 8, LANE_BYTES_S, source)
    return Cluster("atlas950-8192", ASCEND_950DT, _memory(ASCEND_950DT, 144e9), fabric, notes)


def atlas960() -> Cluster:
    """Atlas 960 SuperPoD: 15,488 Ascend 960, announced for the end of 2027."""
    notes = (
        "Announced, not measured. Racks of 8 x 11 and 11 pods of 16 racks are inferred from 176 compute "
        "cabinets.",
        "The plan of 2025: Huawei Connect 2026 showed an Atlas 960E of 4,096 devices.",
    )
    source = f"{_KEYNOTE}: 34 PB/s in all, so 2.2 TB/s both ways per device; split of lanes as in {_PAPER}"
    fabric = _fabric((8, 11), 11, 1.1e12 / (RACK_LANES + POD_LANES + CLOS_LANES), source)
    return Cluster("atlas960-15488", ASCEND_960, _memory(ASCEND_960, 288e9), fabric, notes)


def _memory(device: Device, capacity: float) -> tuple[Tier, ...]:
    rate = device.memory_bytes_s
    return (
        Tier("device", capacity, rate, rate, source=device.source),
        Tier("host", 2e12, 4 * LANE_BYTES_S, 4 * LANE_BYTES_S, shared_by=8, latency_s=2e-6,
             source="inferred: CPU memory pooled over Unified Bus, 4 lanes a device"),
    )  # fmt: skip


def _fabric(rack: tuple[int, int], pods: int, lane_bytes_s: float, source: str) -> tuple[Fabric, ...]:
    latency = "latencies inferred from CloudMatrix384's 0.7 us in the node and 2.1 us across"
    return (
        Fabric("rack", "mesh", rack, RACK_LANES * lane_bytes_s, 0.7e-6, source=f"{source}; {latency}"),
        Fabric("pod", "mesh", (4, 4), POD_LANES * lane_bytes_s, 1.5e-6,
               source=f"{source}; 12 uplink lanes inferred; {latency}"),
        Fabric("superpod", "switch", (pods,), CLOS_LANES * lane_bytes_s, 2.1e-6,
               source=f"{source}; 4 uplink lanes inferred; {latency}"),
    )  # fmt: skip
