"""A cluster counts its devices, changes size, names what it lacks, and refuses contradictions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.cluster import Cluster, Device, Fabric, Rates, Tier
from hyperparallel.cluster.presets import preset
from hyperparallel.cluster.rates import sustained_rates
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure

DEVICE = Device("d", {"bf16": 1e14}, 1e12)
OWN = Tier("device", 80e9, 1e12, 1e12)
HOST = Tier("host", 1e12, 5e10, 5e10)


def machine(*fabric: Fabric, memory: tuple[Tier, ...] = (OWN, HOST)) -> Cluster:
    return Cluster("m", DEVICE, memory, fabric)


def works(cluster: Cluster, count: int) -> bool:
    """Whether boxes of the tiers multiply to `count`: every smaller box of every tier is tried."""
    inner, outer = cluster.fabric[:-1], cluster.fabric[-1]
    whole = 1
    for tier in inner:
        for box in _boxes(tier.size):
            if whole * math.prod(box) == count:
                return True
        whole *= tier.num_members
    if count % whole:
        return False
    if outer.kind != "mesh":
        return True
    return any(whole * math.prod(box) == count for box in _boxes(outer.size))


def _boxes(size: tuple[int, ...]) -> list[tuple[int, ...]]:
    boxes: list[tuple[int, ...]] = [()]
    for full in size:
        boxes = [(*box, n) for box in boxes for n in range(1, full + 1)]
    return boxes


FABRICS = [
    (Fabric("node", "switch", (8,), 4e11, 1e-6), Fabric("net", "switch", (2,), 5e10, 1e-5)),
    (Fabric("rack", "mesh", (4, 4), 4e11, 1e-6), Fabric("pod", "mesh", (2, 3), 1e11, 1e-6)),
    (Fabric("ici", "torus", (4, 4, 4), 4e11, 1e-6), Fabric("dcn", "switch", (1,), 1e9, 1e-5)),
    (Fabric("loop", "ring", (6,), 4e11, 1e-6),),
    (Fabric("package", "mesh", (2,), 2e11, 1e-6), Fabric("node", "switch", (8,), 2e11, 1e-6),
     Fabric("rack", "switch", (12,), 1e11, 1e-6)),
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(fabric=st.sampled_from(FABRICS), count=st.integers(1, 250))
def test_resized_has_the_count_or_names_the_nearest_that_work(fabric: tuple[Fabric, ...], count: int) -> None:
    cluster = machine(*fabric)
    try:
        resized = cluster.resized(count)
    except ClusterError as error:
        assert not works(cluster, count)
        near = [int(word) for word in (error.instead or "").split(" or ")]
        assert all(works(cluster, other) for other in near) and near
        below, above = min(near), max(near)
        assert below < count and not any(works(cluster, n) for n in range(below + 1, count))
        assert above == below or not any(works(cluster, n) for n in range(count + 1, above))
    else:
        assert works(cluster, count)
        assert resized.num_devices == math.prod(resized.dims) == count
        assert [tier.name for tier in resized.fabric] == [tier.name for tier in fabric]


@pytest.mark.parametrize(
    ("name", "count", "dims"),
    [
        ("h100", 4, (4, 1)),
        ("h100", 98_304, (8, 12_288)),
        ("cloudmatrix384", 16, (2, 8, 1, 1)),
        ("cloudmatrix384", 768 * 256, (2, 8, 48, 256)),
        ("ub-mesh-8192", 1024, (8, 8, 4, 4, 1)),
        ("ub-mesh-8192", 16, (8, 2, 1, 1, 1)),
        ("tpu-v5p", 4096, (16, 16, 16, 1)),
        ("tpu-v5p", 512, (8, 8, 8, 1)),
        ("gb200-nvl72", 144, (72, 2)),
    ],
)
def test_machines_grow_and_shrink_as_they_are_built(name: str, count: int, dims: tuple[int, ...]) -> None:
    assert preset(name, count).dims == dims


def test_part_of_a_switch_domain_can_be_left_unused() -> None:
    cluster = preset("gb200-nvl72", 144).narrowed("nvlink", 64)
    assert cluster.dims == (64, 2)
    with pytest.raises(ClusterError, match="1 to"):
        cluster.narrowed("nvlink", 72)
    with pytest.raises(ClusterError, match="write nvlink instead"):
        cluster.narrowed("nvlinks", 8)


def test_a_missing_memory_tier_names_those_there_are() -> None:
    cluster = machine(FABRICS[0][0], memory=(OWN,))
    assert cluster.has_tier("device") and not cluster.has_tier("host")
    with pytest.raises(ClusterError, match="a memory tier of m: device"):
        cluster.tier("host")


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: machine(memory=()), "memory"),
        (lambda: machine(memory=(OWN, OWN)), "memory"),
        (lambda: machine(FABRICS[0][0], FABRICS[0][0]), "fabric"),
        (lambda: machine(Fabric("n", "switch", (8,), 1.5e12, 1e-6)), "fabric.n.bytes_s"),
        (lambda: machine(memory=(HOST, OWN)), "memory"),
        (lambda: machine(memory=(HOST,)), "memory"),
        (lambda: machine(memory=(OWN, replace(HOST, read_bytes_s=2e12))), "memory.host.read_bytes_s"),
        (lambda: machine(Fabric("net", "switch", (10**8,), 5e10, 1e-6)), "fabric"),
        (lambda: machine(replace(FABRICS[0][1], shares="nod")), "fabric.net.shares"),
    ],
)
def test_contradictions_are_refused(build: object, field: str) -> None:
    with pytest.raises(ClusterError) as caught:
        build()  # type: ignore[operator]
    assert caught.value.field == field


def test_one_device_needs_no_fabric() -> None:
    cluster = machine()
    assert cluster.num_devices == 1 and cluster.dims == ()
    assert sustained_rates(cluster, {"tp": 1}).axis_bytes_per_second == {}
    with pytest.raises(ClusterError):
        cluster.resized(2)


def test_rates_of_an_h100_node_are_the_default_ones() -> None:
    """The layout solver's default ratios are an H100 node's, so both must decide alike."""
    rates, default = sustained_rates(preset("h100")), Rates()
    assert rates.flops_per_second == pytest.approx(default.flops_per_second, rel=0.05)
    assert rates.memory_bytes_per_second == pytest.approx(default.memory_bytes_per_second, rel=0.05)
    assert rates.link_bytes_per_second == pytest.approx(default.link_bytes_per_second, rel=0.05)
    assert rates.latency_seconds == default.latency_seconds


def test_axes_are_priced_with_the_slowest_link_they_cross() -> None:
    cluster = preset("h100", 64)
    rates = sustained_rates(cluster, {"tp": 4, "cp": 4, "dp": 4}).axis_bytes_per_second
    assert rates["tp"] == pytest.approx(450e9 * 2 / 3)
    assert rates["cp"] == rates["dp"] == pytest.approx(50e9 * 2 / 3)
