"""What is computed again, what it saves, and what software moves beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyperparallel.cluster.presets import preset
from hyperparallel.errors import UserError
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.layer import layer_work
from hyperparallel.planner.cost.memory import memory_of
from hyperparallel.planner.cost.price import step_seconds
from hyperparallel.planner.cost.work import LayerWork, PassWork
from hyperparallel.planner.search.space import RECOMPUTED
from hyperparallel.planner.strategy import PARTS, Candidates, Strategy
from hyperparallel.workload.presets import gpt, model_preset

pytestmark = pytest.mark.pure
SEQ = 4096


def layer(name: str, index: int = -1, **changes: Any) -> LayerWork:
    """One layer's work for one strategy."""
    model = model_preset(name)
    return layer_work(model.layer_at(index), model, SEQ, Candidates.of([Strategy(**changes)]))


def number(value: Any) -> float:
    """Of the one strategy."""
    return float(np.sum(value))


def flops(work: PassWork) -> float:
    return number(work.flops())


@pytest.mark.parametrize("name", ["llama3.1-8b", "llama2-7b", "gpt3-175b"])
@pytest.mark.parametrize("tp", [1, 4])
def test_full_recomputation_ends_before_the_last_product(name: str, tp: int) -> None:
    model = model_preset(name)
    whole, ended = (layer(name, tp=tp, sp=tp > 1, recompute="full", reentrant=one) for one in (True, False))
    assert flops(whole.again) == pytest.approx(flops(whole.forward))
    mlp = model.layer_at(-1).mlp
    assert mlp is not None
    down = mlp.linears(model.hidden)[-1]
    assert flops(whole.again) - flops(ended.again) == pytest.approx(2 * down.params * SEQ / tp, rel=1e-3)
    sums = [sum(number(m.times) for m in one.again.messages if m.kind == "reduce_scatter")
            for one in (whole, ended)]  # fmt: skip
    assert sums == ([2.0, 1.0] if tp > 1 else [0.0, 0.0])
    assert np.all(whole.saved_bytes == ended.saved_bytes)


def test_experts_are_run_again_whole() -> None:
    whole, ended = (layer("mixtral-8x7b", ep=1, recompute="full", reentrant=one) for one in (True, False))
    assert flops(whole.again) == pytest.approx(flops(ended.again))  # their sum needs every expert's output


def test_torch_stops_there() -> None:
    """The oracle: torch's own checkpoint, counting products."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    up, down = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)
    run = torch.nn.Sequential(up, torch.nn.GELU(), down)
    found = {}
    for reentrant in (True, False):
        x = torch.randn(16, 64, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            checkpoint(run, x, use_reentrant=reentrant).sum().backward()
        found[reentrant] = counter.get_total_flops()
    one = 2 * 16 * 64 * 256
    assert found == {True: 8 * one, False: 7 * one}  # forward 2, again 2 or 1, backward 4


@pytest.mark.parametrize("part", PARTS)
def test_a_part_costs_what_it_is_and_saves_what_it_gives(part: str) -> None:
    name = "deepseek-v3"
    model = model_preset(name)
    plain, again = (layer(name, ep=8, dp=8, parts=parts) for parts in ((), (part,)))
    assert flops(plain.again) == 0 and number(plain.again.stream_bytes) == 0
    saved = number(plain.saved_bytes - again.saved_bytes)
    moe, attention = model.layer_at(-1).mlp, model.layer_at(-1).attention
    assert moe is not None and attention is not None
    expected = {
        "norms": (0, 2 * 2 * SEQ * model.hidden),
        "activations": (0, 2 * SEQ * moe.topk * moe.width),
        "latent": (
            sum(x.flops(SEQ) for x in attention.linears(model.hidden) if x.name in ("q_up", "kv_up")) * SEQ,
            sum(2 * SEQ * x.outputs for x in attention.linears(model.hidden) if x.name in ("q_up", "kv_up")),
        ),
        "experts": (sum(x.flops(SEQ) for x in moe.linears(model.hidden)) * SEQ, None),
    }[part]
    assert flops(again.again) == pytest.approx(expected[0])
    assert saved == pytest.approx(expected[1]) if expected[1] else saved > 0
    messages = sum(number(m.times) for m in again.again.messages)
    assert (messages > 0) == (part == "experts")  # tokens travel again


@pytest.mark.parametrize("name", ["llama3.1-70b", "deepseek-v3", "gpt3-175b"])
def test_light_recomputation_is_all_parts_but_whole_mixtures(name: str) -> None:
    light, parts = (layer(name, **one) for one in ({"recompute": "light"}, {"parts": PARTS[:3]}))
    assert flops(light.again) == flops(parts.again)
    assert number(light.again.stream_bytes) == number(parts.again.stream_bytes) > 0
    assert number(light.saved_bytes) == number(parts.saved_bytes)


def test_light_recomputation_keeps_a_dense_layer_without_norms_and_activations() -> None:
    """Llama: of the inputs of products two come from norms, one from the activation function."""
    model = model_preset("llama3.1-8b")
    kept, light = (number(layer("llama3.1-8b", recompute=r).saved_bytes) for r in ("none", "light"))
    assert kept - light == pytest.approx(2 * SEQ * (2 * model.hidden + 14336))
    assert flops(layer("llama3.1-8b", recompute="light").again) == 0


def test_more_recomputation_is_slower_and_keeps_less() -> None:
    """The order in which the search takes them: `levels` relies on it."""
    for name in ("llama3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "nemotron-3-nano"):
        model, cluster = model_preset(name), preset("h100", 64)
        many = Candidates.of([Strategy(dp=64, ep=8 if model.kinds[-1][0].mlp else 1, recompute=r)  # type: ignore[arg-type]
                              for r in RECOMPUTED])  # fmt: skip
        rows = rows_of(model, cluster, SEQ, 256.0, many)
        seconds, kept = step_seconds(rows, Constants()).seconds, memory_of(rows).activations
        assert np.all(np.diff(seconds) > 0) and np.all(np.diff(kept) < 0)


def test_activations_of_experts_are_not_computed_a_third_time() -> None:
    both, experts = (layer("qwen3-30b-a3b", parts=p) for p in (("activations", "experts"), ("experts",)))
    assert number(both.again.stream_bytes) == number(experts.again.stream_bytes)


def test_parts_are_named_and_kept() -> None:
    strategies = [Strategy(), Strategy(parts=("norms", "experts")), Strategy(parts=["latent"])]  # type: ignore[arg-type]
    assert [Candidates.of(strategies)[i] for i in range(3)] == strategies
    assert strategies[1].words() == "mb1 zero1 again norms experts"
    with pytest.raises(UserError, match="write norms instead"):
        Strategy(parts=("norm",))


def test_selective_recomputation_leaves_scans_alone() -> None:
    kept, again = (layer("mamba2-2.7b", recompute=r) for r in ("none", "selective"))
    assert flops(again.again) == 0 and np.all(kept.saved_bytes == again.saved_bytes)


@pytest.mark.parametrize(("tp", "microbatch", "fused"), [(8, 1, False), (8, 2, True), (4, 1, True)])
def test_megatrons_fused_softmax_wants_heads_in_fours(tp: int, microbatch: int, fused: bool) -> None:
    model = gpt(1024, 2, 16, vocab=50257, seq=1024)
    strategy = Strategy(tp=tp, dp=8 // tp, microbatch=microbatch, flash=False)
    work = layer_work(model.layer_at(0), model, 1024, Candidates.of([strategy])).forward
    scores = 16 / tp * microbatch * 1024**2
    without = layer_work(model.layer_at(0), model, 1024, Candidates.of([Strategy(tp=4, dp=2, flash=False)]))
    assert number(work.launches - without.forward.launches) == (0 if fused else 4)
    assert (number(work.stream_bytes) > (4 + 33) * scores) == (not fused)


NARROW = [("bf16", 1.0), ("fp8", 0.5), ("mxfp8", 0.5156), ("nvfp4", 0.28125)]


@pytest.mark.parametrize(("dtype", "share"), NARROW)
def test_gathers_carry_the_products_format_and_sums_16_bits(dtype: str, share: float) -> None:
    sent = {
        kind: [number(m.num_bytes) for m in layer("llama3.1-8b", tp=4, sp=True, dtype=dtype).forward.messages
               if m.kind == kind and m.axis == "tp"]
        for kind in ("all_gather", "reduce_scatter")
    }  # fmt: skip
    assert sent["reduce_scatter"] == [2.0 * SEQ * 4096] * 2
    assert sent["all_gather"] == pytest.approx([2.0 * share * SEQ * 4096] * 2, rel=1e-3)


@pytest.mark.parametrize(("zero", "ratio"), [(0, 2.0), (1, 1.5), (3, 4 / 3)])
def test_sums_of_gradients_in_32_bits_move_twice_as_much(zero: int, ratio: float) -> None:
    model, cluster = model_preset("llama3.1-8b"), preset("h100", 64)
    wide, narrow = (
        step_seconds(
            rows_of(model, cluster, SEQ, 64.0, Candidates.of([Strategy(dp=64, zero=zero, reduce=one)])),
            Constants(),
        ).communication[0]
        for one in ("float32", "bfloat16")
    )
    assert wide / narrow == pytest.approx(ratio, rel=0.03)


def test_what_is_not_kept_leaves_memory() -> None:
    model, cluster = model_preset("gpt-oss-120b"), preset("gb200-nvl72", 64)
    kinds: tuple[tuple[str, ...], ...] = ((), ("norms",), ("norms", "activations"))
    strategies = [Strategy(dp=64, ep=64, microbatch=4, parts=parts) for parts in kinds]
    peaks = memory_of(rows_of(model, cluster, SEQ, 1280.0, Candidates.of(strategies))).activations
    assert peaks[0] > peaks[1] > peaks[2]
