"""llm-foundry's tables: MPT models under FSDP on A100 and H100.

Sizes are those of llm-foundry's configurations; the column NumParams is held against ours. CLIP: "PURE" keeps
parameters in 16 bits, "DEFAULT" communicates in 16 bits from 32-bit shards, which cost the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.leaderboard.case import Case, Skipped
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets import preset
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.presets import MPT_SIZES, foundry_mpt


def foundry_case(row: Mapping[str, str]) -> Case | Skipped:
    """One row of llm_foundry_rows.csv."""
    section, size = row["section"], row["Model"]
    name = f"{size} seq {row['SeqLen (T)']} on {row['# GPUs']} ({section})"
    if size not in MPT_SIZES:
        return Skipped("llm_foundry_rows", name, f"no facts of model {size!r}")
    devices, seq, micro = int(row["# GPUs"]), int(row["SeqLen (T)"]), int(row["MicroBatchSize"])
    kind = row["Sharding Strategy"]
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}.get(kind)
    if zero is None:
        return Skipped("llm_foundry_rows", name, f"unknown sharding strategy {kind!r}")
    strategy = Strategy(
        dp=devices,
        microbatch=micro,
        zero=zero,
        recompute="full" if row["Activation Checkpointing"] == "True" else "none",
        dtype="fp8" if "fp8" in row["Precision"] else "bf16",
        graph=False,
        reduce="bfloat16" if row["MP Mode"] == "PURE" else "float32",
        attention="open",
    )
    model = foundry_mpt(size, seq)
    batch = devices * micro * int(row["GradAccum"])
    per_second = float(row["Throughput (T/s)"])
    return Case(
        "llm_foundry_rows", f"llm-foundry {section}", name, model, _cluster(row["GPU"], devices), seq, batch,
        strategy, batch * seq / per_second,
    )  # fmt: skip


def _cluster(gpu: str, devices: int) -> Cluster:
    """MosaicML's machines: 8 GPUs a node; 1,600 Gb/s a node between A100, 3,200 between H100. The A100 of 40
    GB has HBM2 at 1.555 TB/s (data sheet)."""
    cluster = preset(gpu.split("_")[0], max(8, devices))
    if gpu != "a100_40gb":
        return cluster
    rate = 1.555e12
    own = replace(cluster.memory[0], capacity_bytes=40960 * 2**20, read_bytes_s=rate, write_bytes_s=rate)
    device = replace(cluster.device, name="a100-sxm-40gb", memory_bytes_s=rate)
    return replace(cluster, name="a100-40gb", device=device, memory=(own, *cluster.memory[1:]))
