"""Megatron-Bridge's performance summaries: tokens per second per GPU on Hopper and Blackwell.

A cell like "31508 (29789)" holds two measurements, the second for the second precision or the second layout
that other cells of the row give in brackets; it makes two cases. Rows are force-balanced. A source is a
machine, which one run calibrates: its factor holds for releases that no table shows yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.leaderboard.case import Case, Skipped
from benchmarks.leaderboard.recipes import switches
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.presets import preset
from hyperparallel.errors import UserError
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.model import Model
from hyperparallel.workload.presets import model_preset

TABLE = "megatron_bridge_rows"
MODELS = {
    "LLAMA3_8B": "llama3.1-8b",
    "LLAMA3_70B": "llama3.1-70b",
    "LLAMA3.1_405B": "llama3.1-405b",
    "DeepSeekV3": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "Kimi_K2": "kimi-k2",
    "Nemotron_3_Nano": "nemotron-3-nano",
    "Nemotron_3_Super": "nemotron-3-super",
    "Nemotron_3_Ultra": "nemotron-3-ultra",
    "Nemotron_3_5_Lightning": "nemotron-3.5-lightning",
}
SYSTEMS = {
    "DGX-H100": "h100",
    "DGX-B200": "b200",
    "DGX-B300": "b300",
    "DGX-GB200": "gb200-nvl72",
    "DGX-GB300": "gb300-nvl72",
}
PRECISIONS = {
    "BF16": "bf16",
    "FP8": "fp8",
    "FP8-CS": "fp8",
    "FP8-MX": "mxfp8",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "": "fp8",  # release 25.09 gives no column; its notes say FP8
}


def bridge_cases(row: Mapping[str, str]) -> Iterator[Case | Skipped]:
    """The one or two measurements of a row of megatron_bridge_rows.csv."""
    system, text = row["System"], row["Model"].strip()
    name = f"{text} {row['Precision'] or '?'} on {row['#-GPUs']} {system} ({row['container']})"
    if "LoRA" in row["task"]:
        yield Skipped(TABLE, name, "low-rank adaptation: most weights have no gradient")
        return
    base = re.sub(r" *\(.*\)", "", text)
    if system not in SYSTEMS:
        yield Skipped(TABLE, name, f"no facts of system {system!r}")
        return
    cells = {key: _both(value) for key, value in row.items()}
    for which in (0, 1):
        if which and all(len(values) == 1 for values in cells.values()):
            return
        if which and len(cells["Tokens / sec / GPU"]) == 1:
            return
        values = {key: both[min(which, len(both) - 1)] for key, both in cells.items()}
        try:
            yield _case(row, values, base, name + (" second" if which else ""), which)
        except UserError as error:
            yield Skipped(TABLE, name, str(error))


def _both(cell: str) -> list[str]:
    """A cell's value, and the one in brackets if there is one; footnotes dropped."""
    cell = re.sub(r"\[\^[^\]]*\]", "", cell)
    found = re.match(r"^\s*([^()]*?)\s*(?:\(([^)]*)\))?\s*$", cell)
    if found is None:
        return [cell]
    return [found[1]] + ([found[2]] if found[2] else [])


def _case(
    row: Mapping[str, str], values: Mapping[str, str], base: str, name: str, which: int
) -> Case | Skipped:
    number = {
        key: _number(values.get(key, "")) for key in ("TP", "PP", "CP", "VP", "EP", "FSDP", "MBS", "GBS")
    }
    devices, seq = int(values["#-GPUs"]), int(values["Sequence Length"])
    precision = PRECISIONS.get(values["Precision"].strip())
    if precision is None:
        return Skipped(TABLE, name, f"unknown precision {values['Precision']!r}")
    if which and not values["Precision"]:
        precision = "mxfp8"
    tp, pp, cp = number["TP"], number["PP"], number["CP"]
    if devices % (tp * pp * cp):
        return Skipped(TABLE, name, f"tp {tp} * pp {pp} * cp {cp} does not divide {devices}")
    strategy = Strategy(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=devices // (tp * pp * cp),
        ep=number["EP"],
        virtual=number["VP"],
        microbatch=number["MBS"],
        zero=3 if number["FSDP"] > 1 else 1,
        sp=tp > 1,
        recompute="none",
        reduce="bfloat16",
        dtype=precision,
        **switches(
            MODELS.get(base, base), row["System"][4:].lower(), precision, row["container"], number["VP"]
        ),
    )
    model = _model(base, row["Model"])
    cluster = _cluster(SYSTEMS[row["System"]], devices)
    if 6 * model.params() / (tp * pp * number["EP"]) > cluster.capacity_bytes:  # the column FSDP is missing
        strategy = replace(strategy, zero=3)
    tokens = float(values["Tokens / sec / GPU"])
    batch = number["GBS"]
    seconds = batch * seq / (tokens * devices)
    return Case(
        TABLE,
        f"Megatron-Bridge {row['System']}",
        name,
        model,
        cluster,
        seq,
        batch,
        strategy,
        seconds,
        recompute_unknown=True,
    )


def _cluster(name: str, devices: int) -> Cluster:
    """Jobs of more than one NVL72 rack take 64 devices of each."""
    if "nvl72" not in name or devices <= 72:
        return preset(name, max(devices, 8) if "nvl72" not in name else devices)
    rack = preset(name)
    return rack.narrowed(rack.fabric[0].name, 64).resized(devices)


def _model(base: str, text: str) -> Model:
    model = model_preset(MODELS.get(base, base))
    if "w/o MTP" in text:
        model = replace(model, mtp=0)
    return model


def _number(cell: str) -> int:
    """A size; "n/a", "" and 0 say that there is no such axis."""
    try:
        return max(int(float(cell)), 1)
    except ValueError:
        return 1
