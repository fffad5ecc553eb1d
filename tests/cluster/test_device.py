"""A device prices matrix products by their shape, and refuses numbers that no device has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.cluster import Device, Gemm, Tier
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure
SIZE = st.integers(1, 20_000)


@settings(deadline=None)
@given(m=SIZE, n=SIZE, k=SIZE)
def test_efficiency_is_a_share_of_the_peak_and_grows_with_k(m: int, n: int, k: int) -> None:
    gemm = Gemm(peak=0.8, tile_m=128, tile_n=256, half_k=64)
    share = float(gemm.efficiency(m, n, k))
    assert 0 < share < 0.8
    assert float(gemm.efficiency(m, n, k + 1)) > share


@settings(deadline=None)
@given(tiles=st.integers(1, 100), k=SIZE, spill=st.integers(1, 127))
def test_a_started_tile_costs_a_whole_one(tiles: int, k: int, spill: int) -> None:
    gemm = Gemm(tile_m=128, tile_n=128)
    seconds = [m * 512 / float(gemm.efficiency(m, 512, k)) for m in (tiles * 128 + spill, (tiles + 1) * 128)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_half_of_peak_is_reached_at_half_k() -> None:
    assert float(Gemm(peak=1.0, half_k=64).efficiency(128, 128, 64)) == pytest.approx(0.5)


def test_efficiency_takes_arrays_like_single_shapes() -> None:
    shapes = np.array([[1, 128, 500], [64, 64, 64], [4096, 4096, 17]])
    many = Gemm().efficiency(shapes[:, 0], shapes[:, 1], shapes[:, 2])
    assert many.tolist() == [float(Gemm().efficiency(*shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"peak_flop_s": {"bf16": 9.9e17}}, "device.peak_flop_s.bf16", "not of a node"),
        ({"peak_flop_s": {"bf16": 989}}, "device.peak_flop_s.bf16", "989e12"),
        ({"peak_flop_s": {"bfloat16": 1e14}}, "device.peak_flop_s", "bf16"),
        ({"peak_flop_s": {}}, "device.peak_flop_s", "at least one"),
        ({"memory_bytes_s": 3.35}, "device.memory_bytes_s", "3.35e12"),
        ({"launch_s": 4.0}, "device.launch_s", "5e-6"),
        ({"units": 0}, "device.units", "at least 1"),
        ({"units": 4, "collective_units": 5}, "device.collective_units", "0 to 4"),
        ({"comm_slowdown": 0.8}, "device.comm_slowdown", "1.0"),
        ({"memory_bytes_s": float("nan")}, "device.memory_bytes_s", "1e+07"),
    ],
)
def test_impossible_devices_are_refused(change: dict[str, object], field: str, hint: str) -> None:
    fields = {"name": "d", "peak_flop_s": {"bf16": 1e14}, "memory_bytes_s": 1e12, **change}
    with pytest.raises(ClusterError) as caught:
        Device(**fields)  # type: ignore[arg-type]
    assert caught.value.field == field and hint in str(caught.value)


@pytest.mark.parametrize("change", [{"peak": 85.0}, {"peak": 0.0}, {"tile_m": 0}, {"half_k": -1}])
def test_impossible_curves_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ClusterError, match=r"device\.gemm"):
        Gemm(**change)  # type: ignore[arg-type]


def test_an_unknown_format_names_those_there_are() -> None:
    with pytest.raises(ClusterError, match="bf16, int8"):
        Device("d", {"bf16": 1e14, "int8": 2e14}, 1e12).peak("fp8")


def test_a_tier_is_shared_only_where_it_is_the_bottleneck() -> None:
    tier = Tier("host", 1e12, 50e9, 25e9, shared_by=8, total_bytes_s=240e9)
    assert tier.contended() == (30e9, 25e9)
    assert tier.contended(1) == (50e9, 25e9)
    assert Tier("host", 1e12, 50e9, 25e9, shared_by=8).contended() == (50e9, 25e9)


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"capacity_bytes": 80}, "memory.host.capacity_bytes", "80e9"),
        ({"capacity_bytes": 2e15}, "memory.host.capacity_bytes", "one tier"),
        ({"read_bytes_s": 55}, "memory.host.read_bytes_s", "55e9"),
        ({"write_bytes_s": 2e13}, "memory.host.write_bytes_s", "one device"),
        ({"shared_by": 0}, "memory.host.shared_by", "at least 1"),
        ({"latency_s": 10.0}, "memory.host.latency_s", "5e-6"),
        ({"total_bytes_s": 1.0}, "memory.host.total_bytes_s", "bytes/s"),
    ],
)
def test_impossible_tiers_are_refused(change: dict[str, float], field: str, hint: str) -> None:
    fields = {"name": "host", "capacity_bytes": 1e12, "read_bytes_s": 5e10, "write_bytes_s": 5e10}
    with pytest.raises(ClusterError) as caught:
        Tier(**{**fields, **change})  # type: ignore[arg-type]
    assert caught.value.field == field and hint in str(caught.value)


def test_disks_of_a_host_hold_more_than_its_memory_may() -> None:
    drives = 8 * 122.88e12  # the largest Solidigm D5-P5336
    assert Tier("disk", drives, 12e9, 6e9).capacity_bytes == drives
    with pytest.raises(ClusterError, match=r"memory\.disk\.capacity_bytes: .* one tier of one host"):
        Tier("disk", 8 * 4e15, 12e9, 6e9)
