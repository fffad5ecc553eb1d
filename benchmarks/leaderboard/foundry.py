"""llm-foundry's tables: MPT models under FSDP on A100 and H100.

Sizes are those of llm-foundry's configurations; the column NumParams is held against ours. CLIP: "PURE" keeps
parameters in 16 bits, "DEFAULT" communicates in 16 bits from 32-bit shards, which cost the same here.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.leaderboard.case import Case, Skipped
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets import preset
from hyperparallel.plan.strategy import Strategy
from hyperparallel.workload.model import Attention, Layer, Mlp, Model

SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
VOCABULARY = 50368


def mpt(size: str, seq: int) -> Model:
    """An MPT: no biases, learned positions, tied embedding, fused attention, no dropout."""
    hidden, layers, heads = SHAPES[size]
    layer = Layer(Attention(heads, hidden // heads), Mlp(4 * hidden, gated=False))
    return Model(
        f"mpt-{size}", hidden, VOCABULARY, ((layer, layers),), tied=True, positions=seq, norm="layer_no_bias"
    )


def foundry_case(row: Mapping[str, str]) -> Case | Skipped:
    """One row of llm_foundry_rows.csv."""
    section, size = row["section"], row["Model"]
    name = f"{size} seq {row['SeqLen (T)']} on {row['# GPUs']} ({section})"
    if size not in SHAPES:
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
    )
    model = mpt(size, seq)
    batch = devices * micro * int(row["GradAccum"])
    per_second = float(row["Throughput (T/s)"])
    return Case(
        "llm_foundry_rows", f"llm-foundry {section}", name, model, _cluster(row["GPU"], devices), seq, batch,
        strategy, batch * seq / per_second,
    )  # fmt: skip


def _cluster(gpu: str, devices: int) -> Cluster:
    """MosaicML's machines: 8 GPUs a node; 1,600 Gb/s a node between A100, 3,200 between H100."""
    return preset(gpu.split("_")[0], max(8, devices))
