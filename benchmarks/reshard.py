"""Redistribution planning: our steps beside DTensor's default and shortest-path planners.

Random (source, target) layouts, seeded, on meshes 8x8, 4x4x4 and 2x4x2x4, for tensors of 2 to 4
dims. Every axis of the source independently replicates, cuts a random dim or is a pending sum; the
target has no pending sums. Axes cut a dim in mesh order, as DTensor's default does ("any order"
rows shuffle them). Bytes are what one rank receives (most of any rank), each planner's steps
counted by the formulae of `hyperparallel.layout.steps`; time is the CPU time of one cold call in a
warm process: no cache is kept between pairs, the garbage collector waits. All planners see each
pair in turn. Run as `python -m benchmarks.reshard [--pairs N] [--seed N]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

# Private planner entry points; checked on torch 2.13.
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos_non_cached,
    clear_redistribute_planner_cache,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.record import Report, Table
from hyperparallel.layout import (
    AllGather,
    AllReduce,
    AllToAll,
    Layout,
    Mesh,
    Pend,
    ReduceScatter,
    Slice,
    find_steps,
)
from hyperparallel.layout.emulate import cut, emulate, join

MESHES = ((8, 8), (4, 4, 4), (2, 4, 2, 4))
NAMES = ("a", "b", "c", "d")
ITEMSIZE = 4


@dataclasses.dataclass(frozen=True)
class Pair:
    """One redistribution, and what each planner made of it: bytes, seconds, steps."""

    kind: str
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    src: str
    dst: str
    partial: bool
    num_bytes: dict[str, int]
    seconds: dict[str, float]
    num_steps: dict[str, int]


def random_dims(
    rng: random.Random, ndim: int, axes: Iterable[str], pending: bool, shuffled: bool
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Axes per dim, and pending sums."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial = {}
    for axis in axes:
        choice = rng.randrange(ndim + 1 + pending)
        if choice < ndim:
            dims[choice].append(axis)
        elif choice > ndim:
            partial[axis] = "sum"
    for dim in dims if shuffled else ():
        rng.shuffle(dim)
    return [tuple(dim) for dim in dims], partial


def random_shape(rng: random.Random, ndim: int, uneven: bool) -> tuple[int, ...]:
    """Even: 64 divides every dim, so that all cuts do."""
    scale = {2: 16, 3: 4, 4: 2}[ndim]
    if uneven:
        return tuple(rng.randrange(33, 64 * scale) for _ in range(ndim))
    return tuple(64 * rng.randrange(1, scale + 1) for _ in range(ndim))


def dtensor_spec(layout: Layout, mesh: DeviceMesh, shape: tuple[int, ...]) -> DTensorSpec:
    """The DTensor spec with the same meaning, order of cuts included."""
    places = {axis: i for i, axis in enumerate(layout.mesh.names)}
    placements: list[Any] = [Replicate() for _ in layout.mesh.names]
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            placements[places[axis]] = Shard(dim)
    for axis, op in layout.partial:
        placements[places[axis]] = Partial(op)
    order = tuple(
        ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(places[axis] for axis in axes))
        for dim, axes in enumerate(layout.dims)
        if axes
    )
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=order)


def dtensor_bytes(src: Layout, shape: tuple[int, ...], transforms: list[Any]) -> tuple[int, int]:
    """Bytes of DTensor's steps as planned, and with neighbouring all-reduces merged into one."""
    plain = merged = 0
    now = src
    run: list[str] = []
    start = src
    for info in transforms:
        axis = src.mesh.names[info.mesh_dim]
        before, after = info.src_dst_placements
        dims = [tuple(a for a in axes if a != axis) for axes in now.dims]
        if isinstance(after, Shard):
            dims[after.dim] += (axis,)
        partial = {a: op for a, op in now.partial if a != axis}
        if isinstance(after, Partial):
            partial[axis] = after.reduce_op
        then = now.replace(dims=dims, partial=partial)
        step: Any = Slice((axis,), now, then, 0)
        if isinstance(before, Partial):
            cut_dim = after.dim if isinstance(after, Shard) else 0
            kind: Any = ReduceScatter if isinstance(after, Shard) else None
            step = kind((axis,), now, then, cut_dim, "sum") if kind else None
            step = step or AllReduce((axis,), now, then, "sum")
        elif isinstance(before, Shard):
            there = after.dim if isinstance(after, Shard) else -1
            gather = AllGather((axis,), now, then, before.dim)
            step = AllToAll((axis,), now, then, before.dim, there) if there >= 0 else gather
        elif isinstance(after, Partial):
            step = Pend((axis,), now, then, "sum")
        cost = step.num_bytes(shape, ITEMSIZE)
        plain += cost
        if isinstance(step, AllReduce):
            start, run = (start, [*run, axis]) if run else (now, [axis])
            joint = AllReduce(tuple(run), start, then, "sum").num_bytes(shape, ITEMSIZE)
            merged += joint - (
                AllReduce(tuple(run[:-1]), start, now, "sum").num_bytes(shape, ITEMSIZE)
                if len(run) > 1
                else 0
            )
        else:
            run = []
            merged += cost
        now = then
    return plain, merged


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the CPU seconds of this thread, which a busy machine does not change."""
    gc.disable()
    start = time.thread_time()
    result = function()
    seconds = time.thread_time() - start
    gc.enable()
    return result, seconds


def plan_pair(
    kind: str,
    device_mesh: DeviceMesh,
    sizes: tuple[int, ...],
    rng: random.Random,
    ndim: int,
    check: bool,
) -> Pair | None:
    """One random pair through all planners; None if source and target are the same."""
    shape = random_shape(rng, ndim, kind == "uneven")
    shuffled = kind == "any order"
    names = NAMES[: len(sizes)]
    src_dims, partial = random_dims(rng, ndim, names, True, shuffled)
    dst_dims, _ = random_dims(rng, ndim, names, False, shuffled)
    # A new mesh for each pair: layouts are interned per mesh, so nothing is left from other pairs.
    mesh = Mesh(sizes, names)
    src, dst = mesh(*src_dims, partial=partial), mesh(*dst_dims)
    if src == dst:
        return None
    steps, ours = timed(lambda: find_steps(src, dst, shape, ITEMSIZE))
    num_bytes = {"ours": sum(step.num_bytes(shape, ITEMSIZE) for step in steps)}
    seconds, num_steps = {"ours": ours}, {"ours": len(steps)}
    specs = [dtensor_spec(layout, device_mesh, shape) for layout in (src, dst)]
    for name, graph in (("default", False), ("shortest", True)):
        clear_redistribute_planner_cache()
        found, seconds[name] = timed(
            lambda graph=graph: _gen_transform_infos_non_cached(*specs, graph)  # type: ignore[misc]
        )
        num_bytes[name], num_bytes[name + " merged"] = dtensor_bytes(src, shape, found)
        num_steps[name] = len(found)
    if check:
        small = tuple(8 + rng.randrange(4) for _ in shape)
        whole = np.arange(math.prod(small)).reshape(small)
        there = emulate(find_steps(src, dst, small), cut(src, whole), small)
        assert np.array_equal(join(dst, there, small), whole)
    args = (str(src)[len(repr(mesh)) :], str(dst)[len(repr(mesh)) :], bool(partial))
    return Pair(kind, sizes, shape, *args, num_bytes, seconds, num_steps)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def bytes_row(label: tuple[Any, ...], pairs: list[Pair]) -> tuple[Any, ...]:
    """Mean bytes per planner, mean of the ratios, losses and wins against the shortest path."""

    def mean(name: str) -> float:
        return statistics.fmean(pair.num_bytes[name] for pair in pairs)

    def best(pair: Pair) -> int:
        return min(pair.num_bytes["shortest"], pair.num_bytes["shortest merged"])

    ours = mean("ours")
    lost = [pair for pair in pairs if pair.num_bytes["ours"] > best(pair)]
    won = [pair for pair in pairs if pair.num_bytes["ours"] < best(pair)]
    return (
        *label,
        len(pairs),
        round(ours / 1e6, 3),
        round(mean("shortest merged") / ours, 2),
        round(mean("shortest") / ours, 2),
        round(mean("default merged") / ours, 2),
        round(mean("default") / ours, 2),
        len(won),
        len(lost),
    )


def time_row(label: tuple[Any, ...], pairs: list[Pair]) -> tuple[Any, ...]:
    row: list[Any] = [*label, len(pairs)]
    for name in ("ours", "default", "shortest"):
        values = [pair.seconds[name] * 1e3 for pair in pairs]
        middle, ninety = statistics.median(values), percentile(values, 0.9)
        row.append(f"{middle:.3f} / {ninety:.3f} / {max(values):.3f}")
    row.append(round(statistics.fmean(pair.num_steps["ours"] for pair in pairs), 2))
    row.append(round(statistics.fmean(pair.num_steps["shortest"] for pair in pairs), 2))
    return tuple(row)


BYTES = (
    "pairs", "mesh", "dims", "count", "ours, mean MB", "shortest merged / ours", "shortest / ours",
    "default merged / ours", "default / ours", "fewer than shortest", "more than shortest",
)  # fmt: skip
TIMES = (
    "pairs", "mesh", "dims", "count", "ours ms: median / P90 / max", "default ms", "shortest ms",
    "our steps", "its steps",
)  # fmt: skip


def report(pairs: list[Pair]) -> Report:
    groups: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in pairs:
        label = (pair.kind, "x".join(map(str, pair.mesh)), len(pair.shape))
        groups.setdefault(label, []).append(pair)
    totals: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in pairs:
        totals.setdefault((pair.kind, "all", "2-4"), []).append(pair)
    rows = [*groups.items(), *totals.items()]
    lost = [
        (p.kind, "x".join(map(str, p.mesh)), p.shape, p.src, p.dst, p.num_bytes["ours"],
         p.num_bytes["shortest merged"], p.num_bytes["shortest"])
        for p in pairs
        if p.num_bytes["ours"] > min(p.num_bytes["shortest"], p.num_bytes["shortest merged"])
    ]  # fmt: skip
    columns = ("pairs", "mesh", "shape", "source", "target", "ours", "shortest merged", "shortest")
    slow = sum(pair.seconds["ours"] > 1e-3 for pair in pairs)
    notes = (
        "MB received by one rank (the most of any rank), float32; ratios are of mean bytes.",
        "merged: neighbouring all-reduces of DTensor's plan counted as one over the joint group, "
        "which DTensor does only where the user has flattened those mesh axes.",
        "any order: cuts of one dim in shuffled axis order; DTensor's default then uses its "
        "shortest-path planner too.",
    )
    return Report(
        "reshard",
        "Redistribution planning",
        (
            Table("Bytes", BYTES, tuple(bytes_row(*row) for row in rows), notes),
            Table("Cold planning time (CPU)", TIMES, tuple(time_row(*row) for row in rows),
                  (f"ours over 1 ms: {slow} of {len(pairs)} pairs",)),
            Table("Losing rows: more bytes than the shortest path", columns, tuple(lost)),
        ),
        packages=("torch", "numpy"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="per mesh, kind and number of dims")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    pairs: list[Pair] = []
    for sizes in MESHES:
        device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[: len(sizes)])
        for ndim in (2, 3, 4):
            for kind in ("even", "uneven", "any order"):
                rng = random.Random(f"{options.seed} {sizes} {ndim} {kind}")
                plan_pair(kind, device_mesh, sizes, rng, ndim, False)
                done = 0
                while done < options.pairs:
                    pair = plan_pair(kind, device_mesh, sizes, rng, ndim, done < 5)
                    if pair is not None:
                        pairs.append(pair)
                        done += 1
    path = report(pairs).write()
    print(path.read_text())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
