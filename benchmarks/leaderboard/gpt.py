"""Tables of GPT models trained with Megatron: vTrain's measured iterations."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.leaderboard.case import Case
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets import preset
from hyperparallel.plan.strategy import Strategy
from hyperparallel.workload.model import Attention, Layer, Mlp, Model

VOCABULARY = 51200


def gpt(hidden: int, layers: int, heads: int, seq: int, vocab: int = VOCABULARY, ffn: int = 0) -> Model:
    """GPT with biases, learned positions and dropout, as Megatron builds it."""
    attention = Attention(heads, hidden // heads, bias=True, out_bias=True)
    layer = Layer(attention, Mlp(ffn or 4 * hidden, gated=False, bias=True))
    return Model(
        f"gpt-{hidden}x{layers}", hidden, vocab, ((layer, layers),), tied=True, positions=seq, dropout=0.1,
        norm="layer",
    )  # fmt: skip


def vtrain_cluster(devices: int) -> Cluster:
    """vTrain's machine: 8 A100 in a node, four 200 Gb/s HDR ports a node (arXiv:2312.12391, section 4)."""
    cluster = preset("a100", max(8, devices))
    inner, outer = cluster.fabric
    slower = type(outer)(**{**outer.__dict__, "bytes_s": 12.5e9})
    return type(cluster)(**{**cluster.__dict__, "name": "a100-vtrain", "fabric": (inner, slower)})


def vtrain_case(table: str, row: Mapping[str, str]) -> Case:
    """One row of vtrain_single.csv or vtrain_multi.csv."""
    number = {key: float(value) for key, value in row.items()}
    devices, layers = int(number["# GPUs"]), int(number["# layers"])
    hidden, heads = int(number["hidden size"]), int(number["attention heads"])
    seq, batch = int(number["sequence length"]), int(number["global batch"])
    several = table == "vtrain_multi"
    strategy = Strategy(
        tp=int(number["tensor parallelism"]),
        pp=int(number["pipeline parallelism"]),
        dp=int(number["data parallelism"]),
        microbatch=int(number["micro batch"]),
        zero=0,
        recompute="full" if several else "none",
        dtype="fp16",
        flash=False,
        overlap=False,
        graph=False,
    )
    model = gpt(hidden, layers, heads, seq)
    return Case(
        table,
        table,
        f"{model.name} b{batch} {strategy.words()}",
        model,
        vtrain_cluster(devices),
        seq,
        batch,
        strategy,
        number["iteration time (ms)"] / 1e3,
        group=f"{table} {model.name} b{batch} on {devices}",
    )
