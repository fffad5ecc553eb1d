"""Tables of GPT models trained with Megatron: vTrain's measured iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.leaderboard.case import Case
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets import preset
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.presets import gpt

VOCABULARY = 50257
"""GPT-2's, which vTrain (src/config.py) cuts over the tensor parallel ranks as it is."""


def vtrain_cluster(devices: int) -> Cluster:
    """vTrain's machine: 8 A100 in a node, four 200 Gb/s HDR ports a node (arXiv:2312.12391, section 4), each
    shared by two."""
    cluster = preset("a100", max(8, devices))
    inner, outer = cluster.fabric
    return replace(cluster, name="a100-vtrain", fabric=(inner, replace(outer, oversubscription=2.0)))


def vtrain_case(table: str, row: Mapping[str, str]) -> Case:
    """One row of vtrain_single.csv or vtrain_multi.csv."""
    number = {key: int(float(value)) for key, value in row.items() if key not in _NOT_WHOLE}
    devices, layers = number["# GPUs"], number["# layers"]
    seq, batch = number["sequence length"], number["global batch"]
    strategy = Strategy(
        tp=number["tensor parallelism"],
        pp=number["pipeline parallelism"],
        dp=number["data parallelism"],
        microbatch=number["micro batch"],
        zero=0,
        recompute="full" if table == "vtrain_multi" else "none",
        reentrant=True,
        reduce="bfloat16",
        dtype="fp16",
        flash=False,
        overlap=False,
        graph=False,
        attention="open",
        fused_loss=False,
    )
    model = gpt(number["hidden size"], layers, number["attention heads"], vocab=VOCABULARY, seq=seq)
    return Case(
        table,
        table,
        f"{model.name} b{batch} {strategy.words()}",
        model,
        vtrain_cluster(devices),
        seq,
        batch,
        strategy,
        float(row["iteration time (ms)"]) / 1e3,
        group=f"{table} {model.name} on {devices}",
    )


_NOT_WHOLE = ("Parameters (billion)", "iteration time (ms)")
