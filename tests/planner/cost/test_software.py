"""What software switches change: how experts run, how tokens reach them, whose attention kernel runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.leaderboard.recipes import switches
from hyperparallel.cluster.presets import preset
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.layer import layer_work
from hyperparallel.planner.cost.price import StepTime, step_seconds
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.workload.mlp import Moe
from hyperparallel.workload.presets import model_preset

pytestmark = pytest.mark.pure


def step(model: str, constants: Constants | None = None, **changes: Any) -> StepTime:
    """Of 8 GB300 with 4 samples of 4,096 tokens a microbatch."""
    strategy = Strategy(**{"dp": 8, "microbatch": 4, "dtype": "mxfp8", **changes})
    rows = rows_of(model_preset(model), preset("gb300-nvl72", 8), 4096, 256.0, Candidates.of([strategy]))
    return step_seconds(rows, constants or Constants())


def test_a_loop_over_experts_costs_the_host_and_fused_experts_do_not() -> None:
    slow, fast = Constants(loop=20.0), Constants(loop=10.0)
    for experts, differs in (("loop", True), ("fused", False)):
        one, two = (step("qwen3-30b-a3b", c, ep=8, experts=experts).seconds[0] for c in (slow, fast))
        assert (one > two * 1.01) == differs


def test_the_loop_is_as_long_as_the_experts_of_a_rank() -> None:
    c = Constants(loop=100.0)
    many, few = (
        step("qwen3-30b-a3b", c, ep=ep).compute[0]
        - step("qwen3-30b-a3b", c.changed(loop=1e-9), ep=ep).compute[0]
        for ep in (2, 8)
    )
    local, fixed = 128.0, 8.0  # two products, each a kernel and a conversion for every expert; eight others
    assert many / few == pytest.approx((4 * local / 2 + fixed) / (4 * local / 8 + fixed))


def test_fusing_and_sending_once_are_never_slower() -> None:
    for ep in (2, 8):
        assert step("qwen3-30b-a3b", ep=ep, experts="fused").seconds < step("qwen3-30b-a3b", ep=ep).seconds
        exchange = step("qwen3-30b-a3b", ep=ep, dispatcher="exchange")
        assert step("qwen3-30b-a3b", ep=ep).exposed_experts < exchange.exposed_experts
        assert step("qwen3-30b-a3b", ep=ep).compute < exchange.compute


def test_exchanges_beside_another_microbatch_are_partly_hidden() -> None:
    shown, hidden = (
        step("qwen3-30b-a3b", ep=8, overlap_experts=one).exposed_experts[0] for one in (False, True)
    )
    assert 0 < hidden < shown


def test_attention_by_the_vendor_in_8_bits_is_fastest() -> None:
    seconds = [step("llama3.1-8b", attention=one).seconds[0] for one in ("open", "vendor", "vendor-8bit")]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 3


def test_a_scan_is_not_the_vendors_attention() -> None:
    assert step("mamba2-2.7b", attention="vendor").seconds == step("mamba2-2.7b", attention="open").seconds


def test_experts_biases_are_streamed_only_outside_the_fused_kernel() -> None:
    memory = [Constants(memory=x) for x in (0.3, 0.6)]
    shares = []
    for experts in ("loop", "fused"):
        slow, fast = (step("gpt-oss-120b", c, ep=8, experts=experts).compute[0] for c in memory)
        shares.append(slow - fast)
    assert shares[0] > 2 * shares[1]


def test_clamps_between_experts_products_are_streamed() -> None:
    """Both halves of the first product's output are read and written twice, by bytes of the routed tokens."""
    model = model_preset("gpt-oss-120b")
    layer = model.layer_at(0)
    assert isinstance(layer.mlp, Moe) and layer.mlp.clamped
    plain = replace(layer, mlp=replace(layer.mlp, clamped=False))
    for experts, times in (("loop", 1.0), ("fused", 0.0)):
        c = Candidates.of([Strategy(dp=8, ep=8, experts=experts)])  # type: ignore[arg-type]
        moved = [layer_work(one, model, 4096, c).forward.stream_bytes.sum() for one in (layer, plain)]
        assert moved[0] - moved[1] == pytest.approx(times * 2 * 2 * (2 + 2) * 4096 * 4 * 2880)


@pytest.mark.parametrize(
    ("release", "dtype", "expected"),
    [
        ("26.04.01", "mxfp8", ("loop", False, "vendor")),
        ("26.06", "bf16", ("loop", False, "vendor")),
        ("26.06", "mxfp8", ("fused", True, "vendor-8bit")),
    ],
)
def test_recipes_change_with_the_release(release: str, dtype: str, expected: tuple[Any, ...]) -> None:
    found = switches("qwen3-235b-a22b", "gb300", dtype, release, 12)
    assert (found["experts"], found["overlap_experts"], found["attention"]) == expected
    assert Strategy(**found).graph and np.isfinite(step("qwen3-235b-a22b", ep=8, **found).seconds[0])
