"""NVIDIA Blackwell: B200 and B300 nodes of 8, and GB200 and GB300 racks of 72 GPUs on one NVLink switch.

Peaks are dense. Number of SMs and memory are what the driver reports. NVLink 5 has 1.8 TB/s both ways, halved
here. `Gemm.peak` is the best share of peak that a search over shapes found in bfloat16 (S. Bekman, Machine
Learning Engineering, "Maximum Achievable Matmul FLOPS": B200 1,745 of 2,250 TFLOP/s, B300 1,769, GB200 1,822
of 2,500; GB300, not measured there, is taken to hold B300's share). Inferred: `launch_s`, latencies, the SMs
that collectives take, and what a GPU sees of local SSDs. `Gemm.attention`: exponentials, whose units did not
grow with the tensor cores, hold attention below products on Blackwell (inferred: 0.8); Blackwell Ultra has
twice as many (data sheet: attention twice as fast), and is taken to reach what Hopper does.
"""

from __future__ import annotations

from dataclasses import replace

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier

_MIB = 2**20
_SHEET = "NVIDIA Blackwell data sheet (HGX B200, GB200 NVL72), dense"
_ULTRA = "NVIDIA Blackwell Ultra data sheet (HGX B300, GB300 NVL72), dense"
_GEMM = Gemm(peak=0.776, tile_m=128, tile_n=256, half_k=64)

B200 = Device(
    name="b200",
    peak_flop_s={
        "bf16": 2.25e15,
        "fp16": 2.25e15,
        "fp8": 4.5e15,
        "mxfp8": 4.5e15,
        "nvfp4": 9e15,
        "mxfp4": 9e15,
        "tf32": 1.125e15,
        "fp32": 75e12,
        "int8": 4.5e15,
    },
    memory_bytes_s=7.7e12,
    launch_s=3e-6,
    units=148,
    collective_units=24,
    gemm=_GEMM,
    source=f"{_SHEET}; 62 TB/s of HBM in 8 GPUs; gemm see above, launch and collective units inferred",
)

# GB200 runs the same chip at 1.2 kW: 2.5 PFLOP/s of bf16, of which 72 make the rack's 180.
GB200 = replace(
    B200,
    name="gb200",
    peak_flop_s={
        "bf16": 2.5e15,
        "fp16": 2.5e15,
        "fp8": 5e15,
        "mxfp8": 5e15,
        "nvfp4": 10e15,
        "mxfp4": 10e15,
        "tf32": 1.25e15,
        "fp32": 80e12,
        "int8": 5e15,
    },
    memory_bytes_s=8e12,
    units=152,
    gemm=replace(_GEMM, peak=0.729),
    source=f"{_SHEET}; NVL72: 180 PFLOP/s bf16, 360 fp8, 720 fp4, 576 TB/s in 72 GPUs; gemm see above",
)

# Blackwell Ultra: the same but for half as much fp4 again, and next to no int8.
B300 = replace(
    B200,
    name="b300",
    peak_flop_s={**B200.peak_flop_s, "nvfp4": 13.5e15, "int8": 150e12},
    memory_bytes_s=7.7e12,
    gemm=replace(_GEMM, peak=0.786, attention=0.95),
    source=f"{_ULTRA}: 108 PFLOP/s fp4 in 8 GPUs; gemm see above, launch and collective units inferred",
)

GB300 = replace(
    GB200,
    name="gb300",
    peak_flop_s={**GB200.peak_flop_s, "nvfp4": 15e15, "int8": 165e12},
    gemm=replace(_GEMM, peak=0.786, attention=0.95),
    source=f"{_ULTRA}; NVL72: 1,080 PFLOP/s fp4, 360 fp8, 180 bf16 in 72 GPUs; gemm see above",
)


def b200(nodes: int = 1) -> Cluster:
    """DGX B200: 8 GPUs on NVSwitch, 8 x 400 Gb/s InfiniBand."""
    return _node(
        "b200", B200, 183_359 * _MIB, 50e9, "DGX B200 data sheet: ConnectX-7, 400 Gb/s per GPU", nodes
    )


def b300(nodes: int = 1) -> Cluster:
    """DGX B300: 8 GPUs on NVSwitch, 8 x 800 Gb/s InfiniBand."""
    return _node(
        "b300", B300, 275_040 * _MIB, 100e9, "DGX B300 data sheet: ConnectX-8, 800 Gb/s per GPU", nodes
    )


def gb200_nvl72(racks: int = 1) -> Cluster:
    """GB200 NVL72: 72 GPUs and 36 Grace CPUs on one NVLink switch; 400 Gb/s per GPU between racks."""
    source = "GB200 NVL72 reference architecture: ConnectX-7, 400 Gb/s per GPU"
    return _rack("gb200-nvl72", GB200, 189_471 * _MIB, 50e9, source, racks)


def gb300_nvl72(racks: int = 1) -> Cluster:
    """GB300 NVL72: 72 GPUs and 36 Grace CPUs on one NVLink switch; 800 Gb/s per GPU between racks."""
    source = "NVL72 AI factory reference architecture: 4 ConnectX-8 (800 Gb/s) per tray of 4 GPUs"
    return _rack("gb300-nvl72", GB300, 284_208 * _MIB, 100e9, source, racks)


def _own(device: Device, capacity: float) -> Tier:
    rate = device.memory_bytes_s
    return Tier(
        "device", capacity, rate, rate, source=f"nvidia-smi total memory of {device.name}; data sheet"
    )


def _node(name: str, device: Device, capacity: float, nic: float, source: str, nodes: int) -> Cluster:
    memory = (
        _own(device, capacity),
        Tier("host", 2e12, 55e9, 55e9, shared_by=8, total_bytes_s=440e9, latency_s=1e-5,
             source="DGX data sheet: 2 TB; PCIe 5.0 x16 per GPU (63 GB/s, about 55 in practice)"),
        Tier("disk", 30e12, 12e9, 6e9, shared_by=8, total_bytes_s=48e9, latency_s=1e-4,
             source="DGX data sheet: 8 x 3.84 TB NVMe; rates inferred"),
    )  # fmt: skip
    return Cluster(name, device, memory, _fabric(8, nodes, nic, source))


def _rack(name: str, device: Device, capacity: float, nic: float, source: str, racks: int) -> Cluster:
    memory = (
        _own(device, capacity),
        Tier("host", 480e9, 225e9, 225e9, shared_by=2, total_bytes_s=450e9, latency_s=5e-6,
             source="GB200 NVL72 data sheet: 17 TB LPDDR5X on 36 Grace; NVLink-C2C 900 GB/s both ways for "
             "two GPUs"),
        Tier("disk", 15e12, 12e9, 6e9, shared_by=4, total_bytes_s=24e9, latency_s=1e-4,
             source="NVL72 reference architecture: 4 E1.S NVMe drives per tray; size and rates inferred"),
    )  # fmt: skip
    return Cluster(name, device, memory, _fabric(72, racks, nic, source))


def _fabric(gpus: int, groups: int, nic: float, source: str) -> tuple[Fabric, ...]:
    return (
        Fabric("nvlink", "switch", (gpus,), 900e9, 2e-6,
               source=f"{_SHEET}: NVLink 5, 1.8 TB/s both ways, with SHARP; latency inferred"),
        Fabric("infiniband", "switch", (groups,), nic, 8e-6, source=f"{source}; latency inferred"),
    )  # fmt: skip
