"""The arithmetic of calibration finds the machine that made-up timings come from."""

from __future__ import annotations

import numpy as np
import pytest

from hyperparallel.cluster.calibration import Collective, Matmul, Timings, describe, fit_link
from hyperparallel.cluster.files import cluster_yaml, parse_cluster

pytestmark = pytest.mark.pure
LAUNCH, PEAK, HALF_K, LATENCY, LINK = 4e-6, {"fp32": 40e9, "bf16": 90e9}, 50.0, 30e-6, 3e9


def timings(noise: float = 0.0, ranks: int = 4) -> Timings:
    random = np.random.default_rng(0)

    def blurred(seconds: float) -> float:
        return seconds * float(np.exp(noise * random.standard_normal()))

    shapes = [(m, n, k) for m in (128, 512) for n in (64, 256) for k in (16, 64, 256, 1024)]
    matmuls = {
        name: [Matmul(m, n, k, blurred(LAUNCH + 2 * m * n * (k + HALF_K) / peak)) for m, n, k in shapes]
        for name, peak in PEAK.items()
    }
    collectives = [
        Collective(kind, group, wire, blurred(LATENCY + wire / LINK))
        for kind in ("all_reduce", "all_gather")
        for group in (2, 4)
        for wire in (512.0, 32e3, 1e6, 8e6)
    ]
    return Timings(
        ranks=ranks, threads=1, matmuls=matmuls, memory=[(1e6, 1e-4), (1e7, 2e-3), (3e7, 1e-2)],
        launch_s=LAUNCH, collectives=collectives, copy_bytes_s=2e9, disk_read_bytes_s=1e9,
        disk_write_bytes_s=2e9, memory_bytes=16e9, disk_bytes=1e11,
    )  # fmt: skip


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.01), (0.05, 0.15)])
def test_the_machine_behind_the_timings_is_found(noise: float, within: float) -> None:
    cluster = describe(timings(noise), "in a test")
    device, link = cluster.device, cluster.fabric[0]
    for name, peak in PEAK.items():
        assert device.peak(name) == pytest.approx(peak, rel=within)
    assert device.gemm.half_k == pytest.approx(HALF_K, rel=0.05 + 3 * within)
    assert link.latency_s == pytest.approx(LATENCY, rel=0.03 + within)
    assert link.bytes_s == pytest.approx(LINK, rel=0.02 + within)
    assert device.memory_bytes_s == 5e9 and device.launch_s == LAUNCH


def test_products_are_priced_as_they_were_timed() -> None:
    data = timings()
    device = describe(data, "in a test").device
    for row in data.matmuls["fp32"]:
        rate = device.peak("fp32") * float(device.gemm.efficiency(row.m, row.n, row.k))
        assert LAUNCH + 2 * row.m * row.n * row.k / rate == pytest.approx(row.seconds, rel=0.03)


def test_the_description_is_a_cluster_file_with_sources() -> None:
    cluster = describe(timings(), "in a test")
    assert parse_cluster(cluster_yaml(cluster)) == cluster
    assert all("in a test" in part.source for part in (cluster.device, *cluster.memory, *cluster.fabric))
    assert cluster.name == "laptop" and cluster.num_devices == 4
    assert [tier.name for tier in cluster.memory] == ["device", "host", "disk"]
    total = cluster.capacity_bytes * 4 + cluster.tier("host").capacity_bytes
    assert total == 16e9  # both are the one memory that the machine has


def test_one_rank_has_no_fabric() -> None:
    assert describe(timings(ranks=1), "in a test").num_devices == 1


def test_a_link_of_latency_alone_fits_too() -> None:
    latency, rate = fit_link([Collective("all_reduce", 2, wire, 1e-4) for wire in (1.0, 10.0, 100.0)])
    assert latency + 100 / rate == pytest.approx(1e-4, rel=0.02)
