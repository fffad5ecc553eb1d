"""Every field of a cluster file changes a price, a bound or a report; what is only for its reader is named.

A new field without an entry in `CHANGES` fails here by its name.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import yaml
from hypothesis import event, given
from hypothesis import strategies as st

from hyperparallel.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.files import cluster_yaml, parse_cluster
from hyperparallel.cluster.memory_tiers import Tier
from hyperparallel.cluster.presets import PRESETS, preset
from hyperparallel.cluster.rates import sustained_rates
from hyperparallel.cluster.threads import Threads
from hyperparallel.errors import ClusterError
from hyperparallel.layout import Mesh
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.table import StrategyTable, predict
from hyperparallel.planner.search.validity import warnings
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.link_load import link_loads
from hyperparallel.planner.step.simulated_step import simulated_step
from hyperparallel.planner.step.stages import Split, even_split
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.simulate.cluster_prices import step_timeline
from hyperparallel.workload.instruction import Instruction
from hyperparallel.workload.presets import load_model

pytestmark = pytest.mark.pure
MESH = Mesh((2, 8), ("dp", "tp"))
PROGRAM = [
    Instruction("a", "matmul", flops=1e9, num_bytes=1e6, dtype="bfloat16", sizes=(64, 64, 64)),
    Instruction("b", "all_reduce", "start", (0,), num_bytes=1e8, axes=("dp",)),
    Instruction("f", "all_reduce", "start", (0,), num_bytes=1e8, axes=("tp",)),
    Instruction("c", "elementwise", num_bytes=1e6, kernel="mul", reuse=((1e7, 1e6),)),
    Instruction("d", "view"),
    Instruction("e", "all_reduce", "wait", (1,)),
    Instruction("g", "all_reduce", "wait", (2,)),
]
GPU = preset("h100", 16)
THREADS = Threads(
    1, 1e-5, 1e-6, {"mul": ((1e3, 1e-5), (1e6, 1e-3))}, {"all_reduce of 2": ((1e6, 1e-4),)},
    {"all_reduce of 2": ((1e6, 1e-4),)}, ((1e4, 1e-11), (1e8, 1e-9)),
)  # fmt: skip
PARTS = {"": GPU, "device": GPU.device, "device.gemm": GPU.device.gemm, "device.threads": THREADS,
         "memory": GPU.memory[1], "fabric": GPU.fabric[0]}  # fmt: skip
"""By place in a file, a value of each kind of record."""

CHANGES: dict[str, Any] = {
    "name": "another",
    "device": replace(GPU.device, launch_s=5e-5),
    "memory": (replace(GPU.memory[0], capacity_bytes=40e9), *GPU.memory[1:]),
    "fabric": (replace(GPU.fabric[0], latency_s=5e-5), GPU.fabric[1]),
    "notes": ("a word of warning",),
    "device.name": "another",
    "device.peak_flop_s": {"bf16": 5e14, "fp32": 6e13},
    "device.memory_bytes_s": 1e12,
    "device.launch_s": 5e-5,
    "device.units": 40,
    "device.collective_units": 30,
    "device.comm_slowdown": 2.0,
    "device.gemm": Gemm(peak=0.3),
    "device.threads": THREADS,
    "device.gemm.peak": 0.3,
    "device.gemm.tile_m": 4096,
    "device.gemm.tile_n": 4096,
    "device.gemm.half_k": 900.0,
    "device.gemm.attention": 0.3,
    "device.gemm.open_attention": 0.3,
    "device.threads.cores": 2,
    "device.threads.slice_s": 1e-3,
    "device.threads.call_s": 1e-4,
    "device.threads.kernels": {"mul": ((1e3, 1e-4),)},
    "device.threads.starts": {"all_reduce of 2": ((1e6, 1e-2),)},
    "device.threads.waits": {"all_reduce of 2": ((1e6, 1e-2),)},
    "device.threads.reuse": ((1e4, 1e-11), (1e8, 1e-8)),
    "memory.name": "cupboard",
    "memory.capacity_bytes": 5e9,
    "memory.read_bytes_s": 5e9,
    "memory.write_bytes_s": 5e9,
    "memory.shared_by": 2,
    "memory.total_bytes_s": 60e9,
    "memory.latency_s": 5e-2,
    "fabric.name": "another",
    "fabric.kind": "ring",
    "fabric.size": (16,),
    "fabric.bytes_s": 50e9,
    "fabric.latency_s": 5e-5,
    "fabric.oversubscription": 2.0,
    "fabric.shares": "infiniband",
}
"""Another value for every field of every record, by its place in a file."""

FOR_READERS = {"device.source", "device.threads.source", "memory.source", "fabric.source"}
"""Where numbers come from: read by people, in the file itself."""


def places() -> list[str]:
    return [f"{at}.{one.name}".lstrip(".") for at, part in PARTS.items() for one in fields(part)]


def changed(place: str) -> Cluster:
    """The machine with one field changed."""
    at, _, name = place.rpartition(".")
    if place == "device.threads" or not at:
        target = GPU if not at else GPU.device
        made = replace(target, **{name: CHANGES[place]})
        return made if isinstance(made, Cluster) else replace(GPU, device=made)
    part = replace(PARTS[at], **{name: CHANGES[place]})
    if isinstance(part, Device):
        return replace(GPU, device=part)
    if isinstance(part, Gemm):
        return replace(GPU, device=replace(GPU.device, gemm=part))
    if isinstance(part, Threads):
        return replace(GPU, device=replace(GPU.device, threads=part))
    if isinstance(part, Tier):
        return replace(GPU, memory=(GPU.memory[0], part, *GPU.memory[2:]))
    assert isinstance(part, Fabric)
    return replace(GPU, fabric=(part, *GPU.fabric[1:]))


def answer(ask: Any) -> Any:
    try:
        return ask()
    except (ClusterError, KeyError) as error:
        return str(error)


def copies(job: PlanningJob) -> float:
    """Seconds of a step whose saved activations go to host memory and back."""
    strategy = Strategy(pp=2, dp=8)
    moved = tuple(tuple((kind, "offload") for kind, _ in stage) for stage in even_split(job, strategy).stages)
    return simulated_step(job, strategy, Split(moved), prices=LayerPrices(job, strategy, Constants())).seconds


def seen(cluster: Cluster) -> list[Any]:
    """What a machine decides: prices of strategies and programs, room, rates, what a report says."""
    job = PlanningJob(load_model("qwen3-0.6b"), cluster, 2048, 64)
    strategies = [
        Strategy(tp=2, dp=8), Strategy(tp=8, dp=2, sp=True, attention="open"), Strategy(pp=2, dp=8),
        Strategy(tp=2, dp=8, offload=1.0), Strategy(tp=2, pp=2, dp=4, zero=3),
    ]  # fmt: skip
    found: list[Any] = []
    found.append(answer(lambda: [(p.seconds, p.parts) for p in predict(job, strategies, Constants())]))
    said = answer(lambda: (job.words(), list(warnings(job, predict(job, strategies[:1], Constants())[0]))))
    timeline = answer(lambda: step_timeline(dict.fromkeys(range(16), PROGRAM), cluster, MESH))
    spans = timeline if isinstance(timeline, str) else timeline.spans
    room = answer(lambda: cluster.tier("host").capacity_per_device_bytes)
    rows = StrategyTable(job, Candidates.of(strategies[:1]), Constants()).rows
    links = answer(lambda: link_loads(cluster, strategies[0], rows))
    found += [said, spans, links, room, cluster.capacity_bytes, sustained_rates(cluster)]
    found.append(answer(lambda: copies(job)))
    return found


def test_every_record_of_a_file_is_walked() -> None:
    kinds = {type(part) for part in PARTS.values()}
    inside = {type(v) for part in PARTS.values() for one in fields(part)
              for v in _flat(getattr(part, one.name)) if is_dataclass(v)}  # fmt: skip
    assert inside <= kinds == {Cluster, Device, Gemm, Threads, Tier, Fabric}


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("place", places())
def test_every_field_decides_something(place: str) -> None:
    if place in FOR_READERS:
        return
    assert place in CHANGES, f"{place} has no entry here that shows what it changes"
    base = GPU
    if place.startswith("device.threads."):
        base = replace(GPU, device=replace(GPU.device, threads=THREADS))
    assert seen(base) == seen(base)
    try:
        after = changed(place)
    except ClusterError as error:  # refused for what it would contradict
        assert place.split(".")[-1] in str(error)
        return
    assert seen(base) != seen(after), f"{place} changes nothing"


MACHINES = sorted(PRESETS.keys() - {"laptop"})


@given(st.sampled_from(MACHINES), st.sampled_from(sorted(CHANGES)), st.floats(1e-7, 1e-4), st.text("é: -\n"))
def test_a_changed_machine_reads_back_equal(name: str, place: str, launch_s: float, note: str) -> None:
    cluster = preset(name)
    try:
        for one in (replace(cluster, notes=(*cluster.notes, note)), changed(place)):
            made = replace(one, device=replace(one.device, launch_s=launch_s))
            text = cluster_yaml(made)
            assert parse_cluster(text) == made
            assert parse_cluster(json.dumps(yaml.safe_load(text))) == made
    except ClusterError as error:  # an impossible machine, which is refused in a file too
        event(error.field)
