"""What papers state in closed form: saved activations, states, bubbles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.leaderboard.anchors import activation_anchors, state_anchors
from hyperparallel.cluster.presets import preset
from hyperparallel.mpmd import SCHEDULES, Action, schedule
from hyperparallel.mpmd.bubble import timed
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.memory import held_last, memory_of, microbatches_held
from hyperparallel.planner.cost.price import cold_seconds, pass_seconds, step_seconds
from hyperparallel.planner.strategy import SCHEDULE_NAMES, Candidates, Strategy
from hyperparallel.workload.presets import gpt, model_preset

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("anchor", activation_anchors(), ids=lambda a: a.name)
def test_saved_activations_are_korthikantis(anchor) -> None:  # type: ignore[no-untyped-def]
    assert anchor.predicted == pytest.approx(anchor.published, rel=1e-9)


@pytest.mark.parametrize("anchor", state_anchors(), ids=lambda a: a.name)
def test_states_are_18_bytes_a_parameter(anchor) -> None:  # type: ignore[no-untyped-def]
    assert abs(anchor.error) < 0.01


def _step(strategies: list[Strategy], batch: float = 64.0, layers: int = 32):  # type: ignore[no-untyped-def]
    model = gpt(4096, layers, 32, vocab=0, seq=0)
    rows = rows_of(model, preset("a100", strategies[0].devices), 2048, batch, Candidates.of(strategies))
    return step_seconds(rows, Constants())


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 8)])
def test_bubble_of_1f1b(p: int, m: int) -> None:
    step = _step([Strategy(pp=p, tp=8, zero=0)], batch=m)
    busy = step.compute + step.exposed_tensor + step.exposed_experts
    assert step.bubble[0] / (busy[0] + step.bubble[0]) == pytest.approx((p - 1) / (m + p - 1), rel=1e-6)


@pytest.mark.parametrize("v", [2, 4])
def test_interleaving_divides_the_bubble(v: int) -> None:
    one, many = (_step([Strategy(pp=4, virtual=x, overlap=False, zero=0)], batch=16) for x in (1, v))
    work = [s.compute[0] + s.exposed_tensor[0] for s in (one, many)]
    assert many.bubble[0] / work[1] == pytest.approx(one.bubble[0] / work[0] / v, rel=1e-6)


@pytest.mark.parametrize("head", [0.0, 0.3, 1.5])
@pytest.mark.parametrize(
    ("name", "v"), [(name, v) for name, one in sorted(SCHEDULES.items()) for v in one.usual_chunks if v < 3]
)
@given(
    st.integers(2, 8),
    st.integers(0, 16),
    st.floats(0.5, 2.0),
    st.floats(0.5, 2.0),
    st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_what_a_schedule_loses_is_what_following_its_order_loses(
    name: str, v: int, head: float, p: int, more: int, forward: float, weights: float, again: float
) -> None:
    record = SCHEDULES[name]
    m, inputs = max(record.least_rounds, 1) * p + more, weights + again * forward
    assume(forward <= inputs + weights)  # a backward takes no less than its forward
    m = -(-m // p) * p if record.rounds and v > 1 else m
    seconds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}

    def price(action: Action) -> float:
        third = (2 if action.kind == "B" else 1) * head / 3
        return seconds[action.kind] / v + (third if action.stage == p * v - 1 else 0.0)

    followed = timed(schedule(name, p, m, v), price).seconds
    p_, m_, v_, code, f, b, a, h = (
        np.full(1, float(x))
        for x in (p, m, v, SCHEDULE_NAMES.index(name), forward, 2 * weights, again * forward, head)
    )
    cold = cold_seconds(p_, m_, v_, code, pass_seconds(f, b, a, h))[0]
    closed = m * (forward + inputs + weights + head) + cold
    # Of a head, what fills the bubble is only counted to the first order.
    assert closed == pytest.approx(followed, rel=0.02 if head else 0.01)


def test_microbatches_held() -> None:
    one = np.ones(1)
    assert microbatches_held(8 * one, 4 * one, one, 0 * one)[0] == 4
    assert microbatches_held(8 * one, 64 * one, one, 0 * one)[0] == 8
    assert microbatches_held(8 * one, 64 * one, 2 * one, 0 * one)[0] == 11.5
    assert microbatches_held(8 * one, 64 * one, one, one)[0] == 64


def test_the_last_stage_holds_least_unless_all_is_kept() -> None:
    one = np.ones(1)
    assert held_last(8 * one, 64 * one, one, 0 * one)[0] == 1
    assert held_last(8 * one, 64 * one, 2 * one, 0 * one)[0] == 4.5  # 9 of its 16 chunks
    assert held_last(8 * one, 64 * one, one, one)[0] == 64


def _memory(model: str, seq: int, batch: float, strategy: Strategy):  # type: ignore[no-untyped-def]
    cluster = preset("h100", strategy.devices)
    return memory_of(rows_of(model_preset(model), cluster, seq, batch, Candidates.of([strategy])))


def test_the_stage_with_the_logits_can_be_the_fullest() -> None:
    """GPipe keeps every microbatch on the last stage too; there the logits come on top."""
    few, many = (
        _memory("llama3.1-8b", 8192, 8.0, Strategy(pp=4, schedule=x, fused_loss=False))  # type: ignore[arg-type]
        for x in ("1f1b", "gpipe")
    )
    assert many.working[0] - few.working[0] > 0.0
    assert many.activations[0] / few.activations[0] == pytest.approx(2.0)


def test_zero_3_gathers_once_a_step_in_a_pipeline() -> None:
    """Whole parameters, in 8 bits where products are, and whole gradients; else only 32-bit shards."""
    low, high, flat = (
        _memory("llama3.1-405b", 8192, 64.0, Strategy(tp=8, pp=p, dp=8, zero=3, sp=True, dtype=d))
        for p, d in ((8, "fp8"), (8, "bf16"), (1, "bf16"))
    )
    assert high.parameters[0] == pytest.approx(high.gradients[0] / 2)
    share = low.parameters[0] / high.parameters[0]
    assert 0.5 < share < 0.55  # the embedding keeps 16 bits
    assert flat.parameters[0] == 0.0
    assert high.reserved[0] > high.total[0] - high.overhead[0]


def test_parts_add_up_and_zero_cuts_states() -> None:
    model, cluster = model_preset("llama3.1-8b"), preset("h100", 64)
    many = Candidates.of(Strategy(tp=2, dp=32, zero=z, sp=True) for z in (0, 1, 2, 3))
    rows = rows_of(model, cluster, 4096, 64.0, many)
    step, memory = step_seconds(rows, Constants()), memory_of(rows)
    parts = step.compute + step.exposed + step.bubble + step.optimizer
    assert step.seconds == pytest.approx(parts)
    states = memory.parameters + memory.gradients + memory.optimizer
    assert (np.diff(states) < 0).all()
    assert memory.optimizer[1] == pytest.approx(memory.optimizer[0] / 32)
