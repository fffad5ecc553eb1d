"""What a rank's instructions cost on a cluster, and the step that they make there.

    products     launch_s + FLOPs / (peak * Gemm.efficiency(m, n, k))
    other ops    launch_s + the larger of FLOPs / peak and bytes / memory bandwidth
    copies       latency_s + bytes / bandwidth of their memory tier while all devices use it
    collectives  rounds * latency_s + received bytes / bandwidth of the slowest tier that their axes cross;
                 they hold a share of their rank's compute units and of its links. Rounds of messages are
                 log2 of the members that a tier joins (a tree), one where members send straight to each other

Of devices that are threads of one machine (`cluster/threads.py`) an op costs what its kernel was timed at,
and a collective is work of its members (`cores.py`).

Leaves out waves of tiles, and links that several groups share beyond their own rank's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyperparallel.cluster.axis_links import tier_spans
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.threads import Threads, seconds_at
from hyperparallel.errors import ClusterError
from hyperparallel.layout import Mesh
from hyperparallel.simulate.cores import run_threads
from hyperparallel.simulate.engine import simulate
from hyperparallel.simulate.rank_tasks import Price, program_tasks
from hyperparallel.simulate.timeline import Timeline
from hyperparallel.workload.instruction import Instruction

FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "int8": "int8"}
"""torch's names of number formats -> those of `Device.peak_flop_s`."""

ALIKE = {
    "elementwise": "mul",
    "normalisation": "native_layer_norm",
    "reduction": "sum",
    "data movement": "clone",
    "view": "clone",
    "attention": "_scaled_dot_product_flash_attention_for_cpu",
}
"""Kind of an op that was not timed -> the kernel that stands for it; others stream like "mul"."""


def step_timeline(programs: Mapping[int, Sequence[Instruction]], cluster: Cluster, mesh: Mesh) -> Timeline:
    """The step that ranks' programs make on a cluster; rank -> instructions.

    Of devices that are threads of one machine all ranks' programs are needed, of others some will do. Raises
    `ClusterError` where the mesh has more ranks than the cluster has devices, or for a number format that
    the device does not have.
    """
    if mesh.size > cluster.num_devices:
        given = f"{cluster.name}: {cluster.num_devices} devices"
        raise ClusterError("cluster", given, f"the {mesh.size} devices of {mesh}, or more")
    if cluster.device.threads is not None:
        return run_threads(programs, ThreadPrices(cluster, cluster.device.threads), mesh.group)
    return simulate(
        program_tasks(programs, ClusterPrices(cluster, mesh), mesh.group), cluster.device.comm_slowdown
    )


@dataclass(frozen=True)
class ClusterPrices:
    """Prices of devices that compute and communicate side by side."""

    cluster: Cluster
    mesh: Mesh

    def op(self, one: Instruction) -> float:
        device = self.cluster.device
        # A view: no kernel is started.
        if not one.flops and not one.num_bytes:
            return 0.0
        arithmetic = one.flops / _flop_s(self.cluster, one) if one.flops else 0.0
        return one.calls * device.launch_s + max(arithmetic, one.num_bytes / device.memory_bytes_s)

    def collective(self, one: Instruction, rank: int) -> Price:
        cluster, device = self.cluster, self.cluster.device
        names = list(reversed(self.mesh.names))  # the last axis is the innermost
        spans = tier_spans(cluster, [self.mesh.axis_size(name) for name in names])[:, :, 0]
        crossed = [
            (link, math.prod(int(spans[names.index(axis)][i]) for axis in one.axes))
            for i, link in enumerate(cluster.fabric)
        ]
        crossed = [(link, size) for link, size in crossed if size > 1]
        if not crossed:
            return Price(device.launch_s)
        latency = sum(
            (1 if one.one_round else math.ceil(math.log2(size))) * link.latency_s for link, size in crossed
        )
        slowest, _ = min(crossed, key=lambda pair: pair[0].bytes_s / pair[0].oversubscription)
        moving = one.num_bytes * slowest.oversubscription / slowest.bytes_s
        # Below 1: `Task` refuses a communication that leaves computation nothing.
        units = min(0.99, device.collective_units / device.units)
        ports = slowest.shares or slowest.name  # collectives over both tiers wait for the same ports
        return Price(latency + moving, {f"{ports} of rank {rank}": 1.0}, units)

    def copy(self, one: Instruction) -> Price:
        return Price(copy_seconds(self.cluster, one))


def copy_seconds(cluster: Cluster, one: Instruction) -> float:
    """Seconds of a copy between memory tiers: latency_s + bytes / bandwidth, where all devices copy at once.

    Its stream says between which: copy.<tier>.in towards the device, copy.<tier>.out away from it. Raises
    `ClusterError` for any other stream, or a tier that the cluster does not have.
    """
    verb, _, rest = one.stream.partition(".")
    name, _, way = rest.rpartition(".")
    if verb != "copy" or way not in ("in", "out"):
        allowed = "copy.<tier>.in or copy.<tier>.out, for what is no collective"
        raise ClusterError("stream", one.stream, allowed)
    tier = cluster.tier(name)
    read, write = tier.contended()
    return tier.latency_s + one.num_bytes / (read if way == "in" else write)


@dataclass(frozen=True)
class ThreadPrices:
    """Core seconds of devices that are threads of one machine."""

    cluster: Cluster
    threads: Threads

    @property
    def cores(self) -> int:
        return self.threads.cores

    @property
    def slice_s(self) -> float:
        return self.threads.slice_s

    @property
    def turns(self) -> float:
        """The device's own rates are of all devices at work at once: this many share one core."""
        return max(1.0, self.cluster.num_devices * self.cluster.device.units / self.threads.cores)

    def op(self, one: Instruction) -> float:
        seconds = sum(map(self._repeated, one.parts or (one,)))
        return seconds + self.threads.late_seconds(one.reuse, one.num_bytes / one.calls)

    def _repeated(self, one: Instruction) -> float:
        """Core seconds of an op that finds its memory in caches."""
        kernels, work = self.threads.kernels, one.flops if one.kind == "attention" else one.num_bytes
        if not one.flops and not one.num_bytes:
            return one.calls * self.threads.call_s
        if one.kind == "matmul" and one.kernel not in kernels:
            launch_s = one.calls * self.cluster.device.launch_s
            return (launch_s + one.flops / _flop_s(self.cluster, one)) / self.turns
        # Its own timing, that of its twin in place, of its kind, at last of an op that streams.
        known = (one.kernel, one.kernel.rstrip("_"), ALIKE.get(one.kind), "mul")  # mul_ costs what mul does
        name = next((name for name in known if name in kernels), None)
        if name is None:
            rate = self.cluster.device.memory_bytes_s * self.turns
            return one.calls * self.threads.call_s + one.num_bytes / rate
        return one.calls * seconds_at(kernels[name], work / one.calls)

    def transfer(self, start: Instruction, members: int) -> tuple[float, float]:
        return self.threads.transfer_seconds(start.kind, members, start.num_bytes)

    def copy(self, one: Instruction) -> float:
        return copy_seconds(self.cluster, one)


def _flop_s(cluster: Cluster, one: Instruction) -> float:
    """FLOP/s of an op with arithmetic; of a product by its sizes, where they are known."""
    device = cluster.device
    wanted = FORMATS.get(one.dtype, "fp32")
    format_name = wanted if wanted in device.peak_flop_s else next(iter(device.peak_flop_s))
    share = float(device.gemm.efficiency(*one.sizes)) if one.sizes else device.gemm.peak
    return device.peak(format_name) * max(share, 1e-6)
