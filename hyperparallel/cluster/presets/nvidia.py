"""NVIDIA nodes of 8 GPUs on InfiniBand: A100, H100, and the H800 of DeepSeek-V3.

Memory is what the driver reports. Peaks are dense: the data sheets' figures "with sparsity" halved. NVLink
figures of the data sheets count both directions and are halved. The InfiniBand tier has size 1 in these
functions; `preset(name, n)` grows it.

`Gemm.peak` is the best share of peak that a search over shapes found in bfloat16 (S. Bekman, Machine Learning
Engineering, "Maximum Achievable Matmul FLOPS": 271.2 of 312 TFLOP/s on A100, 794.5 of 989 on H100).
Inferred, for want of a published figure: `launch_s`, what one GPU sees of the node's SSDs, and link
latencies: NCCL's own model (src/graph/tuning.cc) has 0.6 to 3.4 us a hop of NVLink and 2.7 to 14 us a hop of
the network, by protocol; one value between them is taken per tier.
`Gemm.attention`: H100's fused attention reaches about 600 TFLOP/s at 128 elements a head, forward and
backward over 16,384 tokens (arXiv:2407.08608, figures 5 and 6), nearly as much as its sustained products;
A100's about 190 of 228 (arXiv:2307.08691). Open kernels of the second generation reach 35 % of H100's peak
(arXiv:2407.08608) and about 65 % of A100's, 0.58 times as much in these units; 0.7 meets published runs best.
`collective_units` says how many SMs collectives take; what compute loses beside them is that share of the
SMs, so `comm_slowdown` (anything beyond it) is 1: arXiv 2507.03114 measured 18.9 % on average on A100, H100
and others, and 24 of 132 SMs are 18 %.
"""

from __future__ import annotations

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier

_MIB = 2**20
_H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet (SXM5)"
_DGX_H100 = "NVIDIA DGX H100 user guide"

H100_SXM = Device(
    name="h100-sxm",
    peak_flop_s={
        "bf16": 989.4e12,
        "fp16": 989.4e12,
        "fp8": 1978.9e12,
        "tf32": 494.7e12,
        "fp32": 66.9e12,
        "int8": 1978.9e12,
    },
    memory_bytes_s=3.35e12,
    launch_s=3e-6,
    units=132,
    collective_units=24,  # NCCL takes 16 to 32 channels of one SM each on NVLink; DeepSeek-V3 sets 20 aside
    gemm=Gemm(peak=0.803, tile_m=128, tile_n=256, half_k=64, attention=0.95, open_attention=0.7),
    source=f"{_H100_SHEET}; H100 architecture white paper (132 SMs); gemm see above, launch inferred",
)

A100_SXM = Device(
    name="a100-sxm-80gb",
    peak_flop_s={"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "int8": 624e12},
    memory_bytes_s=2.039e12,
    launch_s=4e-6,
    units=108,
    collective_units=20,  # inferred: NCCL opens up to 24 channels on 12 NVLinks
    gemm=Gemm(peak=0.869, tile_m=128, tile_n=256, half_k=64, attention=0.8),
    source="NVIDIA A100 80GB data sheet; A100 white paper (108 SMs); gemm see above, launch inferred",
)


def a100(nodes: int = 1) -> Cluster:
    """DGX A100 80 GB: 8 GPUs on NVSwitch, 8 x 200 Gb/s HDR InfiniBand."""
    memory = (
        Tier("device", 81_920 * _MIB, 2.039e12, 2.039e12,
             source="A100 80GB data sheet: 2,039 GB/s; nvidia-smi: 81,920 MiB"),
        Tier(
            "host", 2e12, 25e9, 25e9, shared_by=8, total_bytes_s=100e9, latency_s=1e-5,
            source="DGX A100 user guide: 2 TB, PCIe 4.0 x16 (31.5 GB/s, about 25 in practice); two GPUs "
            "share one switch uplink",
        ),
        Tier(
            "disk", 30e12, 12e9, 6e9, shared_by=8, total_bytes_s=24e9, latency_s=1e-4,
            source="DGX A100 user guide: 8 x 3.84 TB NVMe; rates inferred from PCIe 4.0 x4 drives",
        ),
    )  # fmt: skip
    fabric = (
        Fabric("nvlink", "switch", (8,), 300e9, 2e-6,
               source="A100 data sheet: NVLink 600 GB/s both ways; latency inferred"),
        Fabric("infiniband", "switch", (nodes,), 25e9, 8e-6,
               source="DGX A100: one 200 Gb/s HDR port per GPU; latency inferred"),
    )  # fmt: skip
    return Cluster("a100", A100_SXM, memory, fabric)


def h100(nodes: int = 1) -> Cluster:
    """DGX H100: 8 GPUs on NVSwitch, 8 x 400 Gb/s NDR InfiniBand, rail-optimised without oversubscription."""
    return Cluster("h100", H100_SXM, _hopper_memory(), _hopper_fabric(nodes, 450e9, _H100_SHEET))


def h800(nodes: int = 1) -> Cluster:
    """H800 nodes as DeepSeek-V3 was trained on: NVLink cut to 400 GB/s both ways, 8 x 400 Gb/s InfiniBand."""
    source = "DeepSeek-V3 hardware paper, arXiv 2505.09343: H800 NVLink 400 GB/s both ways"
    return Cluster("h800", H100_SXM, _hopper_memory(), _hopper_fabric(nodes, 200e9, source))


def _hopper_memory() -> tuple[Tier, ...]:
    return (
        Tier("device", 81_559 * _MIB, 3.35e12, 3.35e12,
             source=f"{_H100_SHEET}: 3.35 TB/s; nvidia-smi: 81,559 MiB"),
        Tier(
            "host", 2e12, 55e9, 55e9, shared_by=8, total_bytes_s=440e9, latency_s=1e-5,
            source=f"{_DGX_H100}: 2 TB, PCIe 5.0 x16 per GPU (63 GB/s, about 55 in practice)",
        ),
        Tier(
            "disk", 30e12, 12e9, 6e9, shared_by=8, total_bytes_s=48e9, latency_s=1e-4,
            source=f"{_DGX_H100}: 8 x 3.84 TB NVMe; rates inferred from PCIe 4.0 x4 drives",
        ),
    )  # fmt: skip


def _hopper_fabric(nodes: int, nvlink_bytes_s: float, source: str) -> tuple[Fabric, ...]:
    return (
        Fabric("nvlink", "switch", (8,), nvlink_bytes_s, 2e-6,
               source=f"{source}; latency inferred"),
        Fabric("infiniband", "switch", (nodes,), 50e9, 8e-6,
               source=f"{_DGX_H100}: one 400 Gb/s port (ConnectX-7) per GPU; latency inferred"),
    )  # fmt: skip
