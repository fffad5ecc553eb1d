"""Huawei Ascend 910B nodes, and the CloudMatrix384 supernode of 910C dies.

A device is one die, as frameworks count them: CloudMatrix384 has 384 packages of two dies, 768 devices.
Half of a die's vector cores saturate its links, and compute beside a collective is 13-25 % slower (measured
on supernodes); the matrix units themselves are not taken, so `collective_units` is 0 and `comm_slowdown`
carries the middle of that.
"""

from __future__ import annotations

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier

COMM_SLOWDOWN = 1.19
"""Middle of the 13-25 % by which overlapped collectives slow compute on supernodes."""

ASCEND_GEMM = Gemm(peak=0.8, tile_m=128, tile_n=256, half_k=64)
"""Inferred: published MFU above 50 % for whole GPT-3 steps needs big products at about 80 % of peak."""

_CLOUDMATRIX = "Serving LLMs on Huawei CloudMatrix384, arXiv 2506.12708"
_CANN = "CANN platform configuration Ascend910B2: 24 cores at 1.8 GHz, 8,192 FLOPs a cycle of bf16"
_CHIPS = "table of chips in Ascend DrivingSDK, performance-predict"

ASCEND_910B = Device(
    name="ascend-910b",
    peak_flop_s={"bf16": 353.9e12, "fp16": 353.9e12, "fp32": 88e12, "int8": 707.8e12},
    memory_bytes_s=1.6e12,
    launch_s=5e-6,
    units=24,
    comm_slowdown=COMM_SLOWDOWN,
    gemm=ASCEND_GEMM,
    source=f"910B2, the die that the 910C pairs ({_CANN}: 353.9 TFLOP/s); 910B3 has 20 cores and 313; fp32 "
    f"and 1.6 TB/s: {_CHIPS}; launch and gemm inferred",
)

ASCEND_910C_DIE = Device(
    name="ascend-910c-die",
    peak_flop_s={"bf16": 353.9e12, "fp16": 353.9e12, "fp32": 88e12, "int8": 707.8e12},
    memory_bytes_s=1.6e12,
    launch_s=5e-6,
    units=24,
    comm_slowdown=COMM_SLOWDOWN,
    gemm=ASCEND_GEMM,
    source=f"die: {_CANN}: 353.9 TFLOP/s ({_CLOUDMATRIX}: a package has 752 with its vector cores, 128 GB at "
    f"3.2 TB/s); fp32: {_CHIPS}; launch and gemm inferred",
)


def ascend_910b(nodes: int = 1) -> Cluster:
    """Atlas 800T A2: 8 x 910B in a full HCCS mesh, 200 Gb/s RoCE per device."""
    memory = (
        Tier("device", 64 * 2**30, 1.6e12, 1.6e12, source="910B: 64 GB HBM2e, 1.6 TB/s"),
        Tier("host", 1.5e12, 25e9, 25e9, shared_by=8, total_bytes_s=200e9, latency_s=1e-5,
             source="Atlas 800T A2: four Kunpeng 920, PCIe 4.0 x16 per device; capacity and rate inferred"),
        Tier("disk", 15e12, 6e9, 3e9, shared_by=8, total_bytes_s=12e9, latency_s=1e-4,
             source="inferred: four NVMe drives"),
    )  # fmt: skip
    fabric = (
        Fabric("hccs", "mesh", (8,), 196e9, 2e-6,
               source="Atlas 800T A2: HCCS 392 GB/s both ways, seven direct links; latency inferred"),
        Fabric("roce", "switch", (nodes,), 25e9, 1e-5,
               source="Atlas 800T A2: one 200 Gb/s RoCE port per device; latency inferred"),
    )  # fmt: skip
    return Cluster("ascend-910b", ASCEND_910B, memory, fabric)


def cloudmatrix384(supernodes: int = 1) -> Cluster:
    """CloudMatrix384: 48 nodes of 8 packages of 2 dies on a two-level non-blocking Clos of Unified Bus."""
    memory = (
        Tier("device", 64 * 2**30, 1.6e12, 1.6e12,
             source=f"{_CLOUDMATRIX}: half of a package's 128 GB at 3.2 TB/s"),
        Tier("host", 1.5e12, 150e9, 110e9, shared_by=16, total_bytes_s=640e9, latency_s=2e-6,
             source=f"{_CLOUDMATRIX}: CPU memory over UB, four Kunpeng of 160 GB/s each per node; a die "
             "alone reads about 150 and writes about 110 GB/s; capacity inferred"),
    )  # fmt: skip
    fabric = (
        Fabric("package", "mesh", (2,), 210e9, 0.2e-6, source="die to die: 210 GB/s, 0.2 us, measured"),
        Fabric("node", "switch", (8,), 170e9, 0.7e-6,
               source="in the node: 170 GB/s, 0.7 us, measured; 196 GB/s per die by specification"),
        Fabric("supernode", "switch", (48,), 150e9, 2.1e-6, shares="node",
               source=f"across nodes: 150 GB/s, 2.1 us, measured; second level of the Clos ({_CLOUDMATRIX})"),
        Fabric("roce", "switch", (supernodes,), 25e9, 1e-5,
               source=f"{_CLOUDMATRIX}: RDMA plane, 400 Gb/s per package of two dies; latency inferred"),
    )  # fmt: skip
    notes = ("A device is one 910C die; per-package figures of the paper are halved.",)
    return Cluster("cloudmatrix384", ASCEND_910C_DIE, memory, fabric, notes)
