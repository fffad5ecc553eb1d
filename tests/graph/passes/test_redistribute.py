"""Redistributions as nodes: the steps are the cheapest in seconds, and give what one device has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from hyperparallel.cluster import Rates
from hyperparallel.errors import LayoutError
from hyperparallel.graph.passes.redistribute import Redistributor
from hyperparallel.layout import Layout, Mesh, reshard
from hyperparallel.runtime.exec.virtual import run_virtual
from hyperparallel.shard.op_seconds import StepSeconds
from hyperparallel.shard.spec import Spec, spec_of_layout
from hyperparallel.workload import Value

pytestmark = pytest.mark.fake
MESH = Layout((4, 4), ("dp", "tp"))
SHAPE = (32, 8)


class Program:
    """A rank's program of one redistribution."""

    def __init__(self, rank: int, src: Spec, dst: Spec, rates: Rates, dtype: str = "float64") -> None:
        self.graph = fx.Graph()
        self.moved: list[tuple[str, tuple[str, ...], int]] = []
        value = Value("x", SHAPE, dtype, getattr(torch, dtype).itemsize)
        costs = StepSeconds(rates, dtype)
        move = Redistributor(rank, value, "float32", self.emit, self.collect, costs)
        self.graph.output(move(self.graph.placeholder("x"), src, dst))

    def emit(self, fn: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(fn, args, kwargs)

    def collect(self, node: fx.Node, kind: str, axes: Any, num_bytes: int, dtype: str, held: int) -> None:
        self.moved.append((kind, axes, num_bytes))


def pieces_of(whole: Tensor, layout: Layout) -> list[Tensor]:
    return [whole[layout.slices(SHAPE, rank)] for rank in layout.mesh.ranks]


LATE = Rates(link_bytes_per_second=1e12, latency_seconds=1.0)
"""Every message is dear, bytes are not."""
NARROW = Rates(link_bytes_per_second=1.0, latency_seconds=0.0)
"""Bytes are dear, messages are not."""
SLOW_TP = Rates(link_bytes_per_second=1e9, latency_seconds=0.0, axis_bytes_per_second={"tp": 1.0})


@pytest.mark.parametrize(
    "src, dst, rates, expected",
    [
        # Scattered over tp as it is; or in quarters, then gathered: twice the messages, half the bytes.
        (MESH(None, None, partial={"tp": "sum"}), MESH("tp", None), LATE, [("reduce_scatter", ("tp",))]),
        (
            MESH(None, None, partial={"tp": "sum"}),
            MESH("tp", None),
            NARROW,
            [("reduce_scatter", ("tp",)), ("all_gather", ("dp",))],
        ),
        # The whole on every rank: one all-reduce, or a scatter and a gather of it over both axes.
        (MESH(None, None, partial={"tp": "sum"}), MESH(None, None), LATE, [("all_reduce", ("tp",))]),
    ],
)
def test_the_cheapest_steps_in_seconds_run(
    src: Layout, dst: Layout, rates: Rates, expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    torch.manual_seed(0)
    specs = spec_of_layout(src, SHAPE), spec_of_layout(dst, SHAPE)
    programs = [Program(rank, *specs, rates) for rank in MESH.ranks]
    for program in programs:
        assert [one[:2] for one in program.moved] == expected
    whole = torch.randn(SHAPE, dtype=torch.float64)
    parts = torch.randn(3, *SHAPE, dtype=torch.float64)
    summands = [*parts, whole - parts.sum(0)]
    inputs = [[summands[MESH.coordinate(rank)["tp"]]] for rank in MESH.ranks]
    found = run_virtual(programs, inputs, lambda rank, axes: MESH.group(rank, axes))  # type: ignore[arg-type]
    for got, want in zip(found, pieces_of(whole, dst), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_seconds_decide_between_axes_and_count_wide_sums() -> None:
    """Over a slow axis few bytes go; a sum of 16-bit floats moves in float32."""
    src, dst = MESH(None, None, partial={"tp": "sum"}), MESH(None, None)
    specs = spec_of_layout(src, SHAPE), spec_of_layout(dst, SHAPE)
    slow = sum(b for _, axes, b in Program(0, *specs, SLOW_TP).moved if "tp" in axes)
    late = sum(b for _, axes, b in Program(0, *specs, LATE).moved if "tp" in axes)
    assert 0 < slow < late
    priced = StepSeconds(NARROW, "bfloat16"), StepSeconds(NARROW, "bfloat16", "bfloat16")
    (step,) = reshard(src, dst, SHAPE, 2, StepSeconds(LATE, "bfloat16"))
    wide, narrow = (one(step, SHAPE, 2) for one in priced)
    assert wide == 2 * narrow == 2 * step.num_bytes(SHAPE, 2)


@pytest.mark.parametrize(
    "dst", [MESH("dp", None, tier="host"), Mesh((2, 2), ("dp", "tp"), (4, 5, 6, 7))("dp", None)]
)
def test_another_tier_or_mesh_is_refused_with_both_layouts(dst: Layout) -> None:
    src = spec_of_layout(MESH("dp", None), SHAPE)
    other = spec_of_layout(dst, SHAPE)
    assert other.layout() == dst
    with pytest.raises(LayoutError) as caught:
        Program(0, src, other, LATE)
    assert "layout of x" in str(caught.value)
    assert all(str(layout) in str(caught.value) for layout in (src.layout(), dst))
