"""Google TPU v5p: pods of up to 8,960 chips in a torus of three dimensions.

Six links of 100 GB/s each way per chip. Slices are boxes; `resized` picks the one nearest to a cube. Twisted
and unwrapped tori are not modelled, nor that slices are made of cubes of 4 x 4 x 4, of which a job gets at
most 96 (6,144 chips).
"""

from __future__ import annotations

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier

_DOCS = "Google Cloud TPU v5p documentation"

TPU_V5P = Device(
    name="tpu-v5p",
    peak_flop_s={"bf16": 459e12, "fp8": 459e12, "int8": 918e12},
    memory_bytes_s=2.765e12,
    launch_s=1e-6,
    units=2,
    gemm=Gemm(peak=0.9, tile_m=128, tile_n=128, half_k=128),
    source=f"{_DOCS}: 459 TFLOP/s bf16, 95 GiB at 2,765 GB/s, two TensorCores; gemm inferred from MXUs of "
    "128 x 128; launch inferred (one program per step); links are driven by DMA, so no units are taken",
)


def tpu_v5p(pods: int = 1) -> Cluster:
    """A whole v5p pod of 16 x 20 x 28 chips; several pods over the data-centre network."""
    memory = (
        Tier("device", 95 * 2**30, 2.765e12, 2.765e12, source=_DOCS),
        Tier("host", 448e9, 16e9, 16e9, shared_by=4, total_bytes_s=64e9, latency_s=1e-5,
             source=f"{_DOCS}: 448 GB per host of four chips; PCIe rate inferred"),
    )  # fmt: skip
    fabric = (
        Fabric("ici", "torus", (16, 20, 28), 600e9, 1e-6,
               source=f"{_DOCS}: 1,200 GB/s both ways per chip, 3D torus; latency inferred"),
        Fabric("dcn", "switch", (pods,), 6.25e9, 2e-5,
               source=f"{_DOCS}: data-centre network, 50 Gb/s per chip; latency inferred"),
    )  # fmt: skip
    return Cluster("tpu-v5p", TPU_V5P, memory, fabric)
