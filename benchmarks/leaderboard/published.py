"""validation_points.csv: runs from papers and repositories, each with the conventions of its source.

TFLOP/s are turned into seconds with the source's own count of FLOPs (`_flops`): Narayanan et al. count
recomputation (96 B s l h^2 (1 + s / 6h + V / 16 l h)), the Megatron-Core table does not (72, 12).
What a source leaves out is filled in as its text says: see `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.leaderboard.case import Case, Skipped
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets import preset
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.model import Model
from hyperparallel.workload.presets import gpt, model_preset

TABLE = "validation_points"


MINDSPEED_PEAK = 353.9e12
MINDSPEED = "MindSpeed linearity image"


class Source(NamedTuple):
    """What holds for all rows of a source. flash: fused attention. overlap: gradients beside the backward.
    zero: of the optimizer. sp: sequence parallelism where tp is used. recompute: where the row says nothing.
    """

    cluster: str
    flash: bool = False
    overlap: bool = False
    zero: int = 0
    sp: bool = False
    recompute: str = "none"
    recomputed_flops: bool = False


SOURCES = {
    "Narayanan21-T1": Source("a100", recompute="full", recomputed_flops=True),
    "Narayanan21-T2 PTD": Source("a100", recompute="full", recomputed_flops=True),
    "Narayanan21-T2 ZeRO-3": Source("a100", zero=3, recompute="full", recomputed_flops=True),
    "Korthikanti22-T4": Source("a100"),
    "Korthikanti22-T5": Source("a100"),
    "MT-NLG22": Source("a100", recompute="full"),
    "MegaScale24-T2 Megatron-LM": Source("a100", True, False, 1, True, "selective"),
    "MegaScale24-T2 MegaScale": Source("a100", True, True, 1, True, "selective"),
    "torchtitan": Source("h100-torchtitan", True, True, 3, True),
    "Megatron-Core H100 table": Source("h100", True, True, 1, True),
    "ModelLink mid-2024": Source("ascend-910b", True, True, 1, True),
    MINDSPEED: Source("ascend-910b", True, True, 1, True),
}
MODELS = {
    "Llama2-7B": "llama2-7b",
    "Llama2-13B": "llama2-13b",
    "Llama2-70B": "llama2-70b",
    "Llama3-8B": "llama3.1-8b",
    "Llama3-70B": "llama3.1-70b",
    "CodeLlama-34B": "codellama-34b",
    "LLaMA-65B": "llama-65b",
    "Qwen1.5-32B": "qwen1.5-32b",
    "Qwen1.5-72B": "qwen1.5-72b",
    "Bloom-176B": "bloom-176b",
    "GPT3-175B": "gpt3-175b",
}


TUNED = ("Narayanan21-T1", "Megatron-Core H100 table")
"""Sources that leave out microbatch and chunks a stage of runs that their authors tuned."""

MODELLINK: Mapping[str, Mapping[str, Any]] = {
    "Bloom-176B": {"recompute": "full", "flash": False, "overlap": False},
    "GPT3-175B": {"virtual": 3},
    "LLaMA-65B": {"overlap": False},
    "Llama2-70B": {"virtual": 4},
    "Llama3-70B": {"overlap": False},
    "Qwen1.5-32B": {"virtual": 8},
    "Qwen1.5-72B": {"virtual": 5},
}
"""What ModelLink's launch scripts of these rows say beyond them (examples/ of September 2024):
--num-layers-per-virtual-pipeline-stage, no --use-mc2 (products overlapped with sums), full recomputation and
no --use-flash-attn for Bloom."""


def published_case(row: Mapping[str, str]) -> Case | Skipped:
    """One row of validation_points.csv."""
    source, name = row["source"], f"{row['source']}: {row['name']} on {row['n_dev']}"
    facts = SOURCES.get(source)
    if facts is None:
        return Skipped(TABLE, name, f"unknown source {source!r}")
    number = {key: int(float(value)) for key, value in row.items() if _is_number(value) and key in NUMBERS}
    model = _model(row, number)
    if model is None:
        return Skipped(TABLE, name, f"no facts of model {row['name']!r}")
    if source == MINDSPEED:  # its text gives no layout: that of ModelLink's row of the same model
        number |= {"seq": 2048, "mbs": 2, "tp": 8, "pp": 16, "gbs_seq": 8 * number["n_dev"]}
    devices, seq = number["n_dev"], number["seq"]
    tp, cp, pp = number.get("tp", 1), number.get("cp", 1), number.get("pp", 1)
    dp = number.get("dp", devices // (tp * cp * pp))
    if tp * cp * pp * dp != devices:
        return Skipped(TABLE, name, f"tp {tp} * cp {cp} * pp {pp} * dp {dp} is not {devices}")
    batch = number.get("gbs_seq", number.get("mbs", 1) * dp)
    strategy = _strategy(row, number, facts, dp)
    cluster = _cluster(facts, devices)
    seconds = _seconds(row, model, seq, batch, devices, facts)
    if source == "Korthikanti22-T4":  # one layer alone, without embedding, head or optimizer
        model = replace(model, vocab=0, positions=0, layers=((model.layer_at(0), 1),))
    choices = _choices(strategy, model.num_layers, batch) if source in TUNED else ()
    return Case(
        TABLE,
        source,
        f"{name} {'' if choices else strategy.words()}".strip(),
        model,
        cluster,
        seq,
        batch,
        strategy,
        seconds,
        whole_step=source != "Korthikanti22-T4",
        choices=choices,
        memory_bytes=_peak(row),
    )


def _choices(strategy: Strategy, layers: int, batch: int) -> tuple[Strategy, ...]:
    """What Narayanan et al. tuned (section 5.1: interleaved, "degrees picked using heuristics")."""
    virtual = [v for v in range(1, 9) if strategy.pp > 1 and layers % (strategy.pp * v) == 0] or [1]
    micro = [b for b in (1, 2, 4, 8) if batch % (strategy.dp * b) == 0]
    return tuple(replace(strategy, microbatch=b, virtual=v) for b in micro for v in virtual)


def _peak(row: Mapping[str, str]) -> float:
    """Bytes of a "tokens/s/GPU ; peak GiB" row."""
    if "peak GiB" not in row["metric"]:
        return 0.0
    return float(row["value"].split(";")[1]) * 2**30


NUMBERS = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq", "n_dev", "gbs_seq", "mbs",
           "tp", "cp", "pp", "vpp", "dp", "fsdp")  # fmt: skip


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _model(row: Mapping[str, str], number: Mapping[str, int]) -> Model | None:
    if row["name"].startswith("Llama3.1"):
        return model_preset("llama3.1-" + row["name"].split()[1].lower())
    if not row["hidden"]:
        known = MODELS.get(row["name"])
        return model_preset(known) if known else None
    made = gpt(
        number["hidden"], number.get("layers", 1), number["heads"],
        number.get("vocab", 51200), number["seq"], ffn=number.get("ffn", 0),
    )  # fmt: skip
    if row["source"] == "MegaScale24-T2 MegaScale":  # attention and feed-forward part read one input
        return replace(made, layers=tuple((replace(layer, parallel=True), n) for layer, n in made.layers))
    return made


def _strategy(row: Mapping[str, str], number: Mapping[str, int], facts: Source, dp: int) -> Strategy:
    tp, pp = number.get("tp", 1), number.get("pp", 1)
    micro = number.get("mbs", 1)
    if row["source"] == "torchtitan" and pp > 1:
        micro = max(micro // pp, 1)  # the column is the local batch, cut into as many microbatches as stages
    recompute = {"full": "full", "selective": "selective", "SAC": "alternate"}.get(
        row["recompute"], facts.recompute
    )
    sp = facts.sp and tp > 1
    if row["source"].startswith("Korthikanti"):
        sp = row["sp"] == "1" or " sp" in row["name"]
        kind = row["name"].rsplit(" ", 1)[-1]
        recompute = row["recompute"] or {"full": "full", "selective": "selective", "sp+sel": "selective"}.get(
            kind, "none"
        )
    made = Strategy(
        tp=tp,
        cp=number.get("cp", 1),
        pp=pp,
        dp=dp,
        virtual=number.get("vpp", 1) or 1,
        microbatch=micro,
        zero=facts.zero,
        sp=sp,
        recompute=recompute,  # type: ignore[arg-type]
        reentrant=row["source"] != "torchtitan",
        reduce="bfloat16" if row["precision"] == "fp16" else "float32",
        dtype=row["precision"] or "bf16",
        flash=facts.flash,
        overlap=facts.overlap,
        graph=False,
        attention="open",
        fused_loss=facts.flash and row["source"] != "torchtitan",
    )
    return replace(made, **MODELLINK.get(row["name"], {})) if facts.cluster == "ascend-910b" else made


def _cluster(facts: Source, devices: int) -> Cluster:
    """torchtitan's H100 have HBM at 2.4 TB/s and are held to 500 W, which lowers their clock: sustained
    matrix products fall with about the cube root of power (inferred)."""
    if facts.cluster != "h100-torchtitan":
        return preset(facts.cluster, max(8, devices))
    cluster = preset("h100", max(8, devices))
    share = cluster.device.gemm.peak * (500 / 700) ** (1 / 3)
    device = replace(cluster.device, memory_bytes_s=2.4e12, gemm=replace(cluster.device.gemm, peak=share))
    own = replace(cluster.memory[0], capacity_bytes=96e9, read_bytes_s=2.4e12, write_bytes_s=2.4e12)
    return replace(cluster, name="h100-500w", device=device, memory=(own, *cluster.memory[1:]))


def _seconds(
    row: Mapping[str, str], model: Model, seq: int, batch: int, devices: int, facts: Source
) -> float:
    value, metric = row["value"], row["metric"]
    if metric == "iteration time":
        return float(value)
    if metric == "fwd/bwd per layer":
        return sum(float(part) for part in value.split("/")) / 1e3
    if metric.startswith("tokens/s"):
        return batch * seq / (float(value.split(";")[0]) * devices)
    if metric == "linearity;MFU":  # the count of its parent Megatron, against 910B1's peak (inferred)
        per_token = 3 * model.flops_per_token(seq, causal=False)
        return per_token * batch * seq / (float(value.split(";")[1]) * MINDSPEED_PEAK * devices)
    layers, hidden = model.num_layers, model.hidden
    vocabulary = model.vocab / (12 * layers * hidden)
    per_token = 72 * layers * hidden**2
    factor = 1 + seq / (6 * hidden) + vocabulary
    if facts.recomputed_flops:
        per_token, factor = 96 * layers * hidden**2, 1 + seq / (6 * hidden) + vocabulary * 0.75
    return per_token * factor * batch * seq / (float(value) * 1e12 * devices)
