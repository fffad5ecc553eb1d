"""Prices of instructions on clusters: the formulas of the docstrings, and timings read back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperparallel.cluster import Threads
from hyperparallel.cluster.memory_tiers import Tier
from hyperparallel.cluster.presets import preset
from hyperparallel.cluster.presets.laptop import guessed
from hyperparallel.errors import ClusterError
from hyperparallel.layout import Mesh
from hyperparallel.simulate import ClusterPrices, ThreadPrices, step_timeline
from hyperparallel.workload.instruction import Instruction

pytestmark = pytest.mark.pure
MESH = Mesh((2, 8), ("dp", "tp"))
H100 = preset("h100", 16)
PRICES = ClusterPrices(H100, MESH)
THREADS = Threads(
    cores=2, slice_s=4e-3, call_s=1e-6,
    kernels={"mul": ((1e3, 1e-6), (1e6, 1e-3)), "sqrt": ((1e3, 5e-6),)},
    starts={"all_reduce of 2": ((1e3, 3e-6),)}, waits={"all_reduce of 2": ((1e3, 4e-6),)},
    reuse=((1e3, 1e-11), (1e9, 5e-11)),
)  # fmt: skip
LAPTOP = replace(guessed(4), device=replace(guessed(4).device, threads=THREADS))
ON_CORES = ThreadPrices(LAPTOP, THREADS)


def test_products_and_streams_on_a_gpu() -> None:
    m = 4096
    product = Instruction("mm", "matmul", flops=2.0 * m**3, dtype="bfloat16", sizes=(m, m, m))
    rate = H100.device.peak("bf16") * float(H100.device.gemm.efficiency(m, m, m))
    assert PRICES.op(product) == pytest.approx(H100.device.launch_s + 2.0 * m**3 / rate)
    stream = Instruction("add", "elementwise", num_bytes=1e9)
    assert PRICES.op(stream) == pytest.approx(H100.device.launch_s + 1e9 / H100.device.memory_bytes_s)
    assert PRICES.op(Instruction("view", "view")) == 0.0


def test_collectives_pay_for_the_slowest_tier_they_cross() -> None:
    inside, across = (
        PRICES.collective(Instruction("c", "all_reduce", "start", num_bytes=1e9, axes=(axis,)), 0)
        for axis in ("tp", "dp")
    )
    node, network = H100.fabric[:2]
    assert inside.seconds == pytest.approx(3 * node.latency_s + 1e9 / node.bytes_s)
    assert across.seconds == pytest.approx(
        network.latency_s + 1e9 * network.oversubscription / network.bytes_s
    )
    assert [*inside.demand] == [f"{node.name} of rank 0"] and [*across.demand] == [
        f"{network.name} of rank 0"
    ]
    assert 0.0 < inside.units < 1.0
    straight = Instruction("c", "permute", "start", num_bytes=1e9, axes=("tp",), one_round=True)
    assert PRICES.collective(straight, 0).seconds == pytest.approx(node.latency_s + 1e9 / node.bytes_s)


def test_kernels_cost_what_they_were_timed_at() -> None:
    def seconds(kernel: str, kind: str = "elementwise", **more: object) -> float:
        return ON_CORES.op(Instruction("x", kind, kernel=kernel, num_bytes=1e3, **more))  # type: ignore[arg-type]

    assert seconds("sqrt") == 5e-6 and seconds("mul_") == pytest.approx(1e-6)
    assert seconds("unheard_of") == pytest.approx(1e-6)  # streams
    assert seconds("sqrt", reuse=((1e12, 1e6),)) == pytest.approx(5e-6 + 1e6 * 4e-11)
    parts = tuple(Instruction("p", "elementwise", num_bytes=3e3, kernel=k, calls=3) for k in ("mul", "sqrt"))
    assert seconds("", "update", parts=parts, calls=6) == pytest.approx(3 * 1e-6 + 3 * 5e-6)
    assert ON_CORES.op(Instruction("v", "view")) == 1e-6
    start = Instruction("s", "all_reduce", "start", num_bytes=1e3, axes=("tp",))
    assert ON_CORES.transfer(start, 2) == (3e-6, 4e-6)


def test_a_product_alone_on_a_core_takes_no_turns() -> None:
    """The device's own rate is that of four ranks on two cores, half a core each."""
    product = Instruction("mm", "matmul", flops=2e9, sizes=(1000, 1000, 1000))
    device = LAPTOP.device
    all_at_once = device.launch_s + 2e9 / (device.peak("fp32") * float(device.gemm.efficiency(*[1000] * 3)))
    assert ON_CORES.op(product) == pytest.approx(all_at_once / 2)


def test_a_step_needs_as_many_devices_as_ranks() -> None:
    with pytest.raises(ClusterError, match="the 16 devices"):
        step_timeline({0: []}, preset("h100", 8), MESH)


@pytest.mark.parametrize(("way", "rate"), [("in", 6e9), ("out", 2.5e9)])
def test_copies_cost_latency_and_bytes_over_the_tiers_bandwidth(way: str, rate: float) -> None:
    """Towards the device 6 GB/s; away from it 5 alone, but 20 for the eight of a host: 2.5 GB/s each."""
    tier = Tier("host", 2e12, 6e9, 5e9, shared_by=8, total_bytes_s=20e9 if way == "out" else None,
                latency_s=3e-3)  # fmt: skip
    copy = Instruction("c", "copy", "start", num_bytes=1e9, stream=f"copy.host.{way}")
    wanted = 3e-3 + 1e9 / rate
    cluster = replace(H100, memory=(H100.memory[0], tier))
    assert ClusterPrices(cluster, MESH).copy(copy).seconds == pytest.approx(wanted)
    laptop = replace(LAPTOP, memory=(LAPTOP.memory[0], tier))
    assert ThreadPrices(laptop, THREADS).copy(copy) == pytest.approx(wanted)

    # One step of two ranks on a laptop: the copy begins 1 us after the step, its wait costs 1 us of a core.
    program = [copy, Instruction("w", "wait", "wait", (0,))]
    found = step_timeline(dict.fromkeys(range(2), program), laptop, Mesh((2,), ("dp",)))
    assert found.step_seconds == pytest.approx(1e-6 + wanted + 1e-6)


@pytest.mark.parametrize("stream", ["comm", "copy.host", "copy.pool.in", "copy.host.up"])
def test_a_copy_needs_a_tier_that_is_there(stream: str) -> None:
    copy = Instruction("c", "copy", "start", num_bytes=1.0, stream=stream)
    with pytest.raises(ClusterError, match="pool" if "pool" in stream else "copy.<tier>.in"):
        PRICES.copy(copy)
