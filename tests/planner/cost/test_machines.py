"""Whole machines: what the UB-Mesh paper found, laws of faster hardware, and equal prices for equal work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.leaderboard.speed import grid
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.presets import preset
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import PRIORS, Constants
from hyperparallel.planner.cost.memory import memory_of
from hyperparallel.planner.cost.price import step_seconds
from hyperparallel.planner.cost.rows import Rows
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.workload.presets import model_preset

pytestmark = pytest.mark.pure


def _seconds(cluster: Cluster, name: str, batch: float, many: Candidates, seq: int = 8192) -> np.ndarray:
    return step_seconds(rows_of(model_preset(name), cluster, seq, batch, many), Constants()).seconds


@pytest.mark.parametrize(("name", "batch"), [("gpt3-175b", 4096.0), ("llama3.1-405b", 2048.0)])
def test_a_mesh_is_nearly_a_clos(name: str, batch: float) -> None:
    mesh = preset("ub-mesh-8192")
    rate = sum(tier.bytes_s for tier in mesh.fabric)
    clos = replace(mesh, fabric=(Fabric("clos", "switch", (8192,), rate, 0.7e-6, source="as much in all"),))
    model, many = model_preset(name), grid(8192, False, 96)
    best = []
    for cluster in (mesh, clos):
        rows = rows_of(model, cluster, 8192, batch, many)
        fits = memory_of(rows).total < cluster.capacity_bytes
        best.append(step_seconds(rows, Constants()).seconds[fits].min())
    assert 0.925 < best[1] / best[0] < 0.965


def test_wide_tensor_parallelism_pays_inside_a_wide_node() -> None:
    many = Candidates.of(
        Strategy(tp=tp, pp=128 // tp // 2, dp=128, virtual=2, sp=True, overlap=False) for tp in (8, 16)
    )
    plane = _seconds(preset("ub-mesh-8192"), "llama3.1-405b", 1024.0, many)
    nodes = _seconds(preset("h100", 8192), "llama3.1-405b", 4096.0, many)
    assert plane[1] < plane[0]
    assert nodes[0] < nodes[1]


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 8]),
    zero=st.sampled_from([0, 1, 3]),
    overlap=st.booleans(),
    factor=st.floats(1.0, 8.0),
)
def test_faster_hardware_is_never_slower(
    tp: int, pp: int, ep: int, zero: int, overlap: bool, factor: float
) -> None:
    cluster = preset("h100", 64)
    many = Candidates.of([Strategy(tp=tp, pp=pp, dp=64 // tp // pp, ep=ep, zero=zero, overlap=overlap)])
    before = _seconds(cluster, "mixtral-8x7b", 64.0, many, 2048)[0]
    links = tuple(replace(tier, bytes_s=min(tier.bytes_s * factor, 1.9e12)) for tier in cluster.fabric)
    device = cluster.device
    for faster in (
        replace(cluster, fabric=links),
        replace(cluster, device=replace(device, memory_bytes_s=device.memory_bytes_s * factor)),
        replace(cluster, device=replace(device, launch_s=device.launch_s / factor)),
    ):
        assert _seconds(faster, "mixtral-8x7b", 64.0, many, 2048)[0] <= before * (1 + 1e-9)


def test_shapes_priced_once_are_priced_as_one_by_one() -> None:
    model, cluster = model_preset("deepseek-v3"), preset("h100", 256)
    strategies = [
        Strategy(tp=tp, pp=pp, dp=256 // tp // pp, ep=ep, virtual=v, zero=zero, sp=True, order=order)  # type: ignore[arg-type]
        for tp in (1, 8)
        for pp, v in ((1, 1), (4, 1), (4, 2))
        for ep in (1, 16)
        for zero in (1, 3)
        for order in ("tp-cp-dp-pp", "tp-cp-pp-dp")
    ]
    together = rows_of(model, cluster, 4096, 512.0, Candidates.of(strategies))
    alone = Rows.joined(
        [rows_of(model, cluster, 4096, 512.0, Candidates.of([strategy])) for strategy in strategies]
    )
    a, b = step_seconds(together, Constants()), step_seconds(alone, Constants())
    assert a.seconds == pytest.approx(b.seconds, rel=1e-9)
    assert a.communication == pytest.approx(b.communication, rel=1e-9)
    assert memory_of(together).total == pytest.approx(memory_of(alone).total)
    assert len(together.cell_row) < len(alone.cell_row)


def test_committed_constants_are_near_what_was_believed() -> None:
    logs = Constants().logs()
    for (name, prior), log in zip(PRIORS.items(), logs, strict=True):
        assert abs(log - np.log(prior.value)) < 3.5 * prior.sigma, name
