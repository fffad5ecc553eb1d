"""The space: what divides, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperparallel.planner.search.axis_order import axis_orders
from hyperparallel.planner.search.space import (
    Limits,
    even_enough,
    levels,
    norm_cuts,
    pipelines,
    skeletons,
    tensor_sizes,
    zeros,
)
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.presets import load_model, model_names
from tests.planner.sample import job

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "model", ["qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v2-lite", "mamba2-2.7b", "dit-xl-2"]
)
def test_every_skeleton_is_a_strategy_of_all_devices(model: str) -> None:
    one = job(model, devices=16, batch=48, seq=4096)
    found = skeletons(one)
    assert found and len(set(found)) == len(found)
    for s in found:
        strategy = Strategy(**s._asdict())
        assert strategy.devices == 16
        assert one.global_batch % (s.dp * s.microbatch) == 0
        assert s.pp <= one.model.num_layers
        for layer, _ in one.model.kinds:
            if layer.attention is not None:
                assert layer.attention.heads % s.tp == 0


def test_no_stage_is_empty() -> None:
    for layers in range(1, 40):
        for parts in range(1, 40):
            each = -(-layers // parts)
            last = layers - each * (parts - 1)
            assert even_enough(layers, parts) == (last > 0)


def test_key_value_heads_are_cut_or_copied() -> None:
    # Llama 3.1 8B has 32 heads and 8 key/value heads: 16 ranks hold each of them twice.
    assert tensor_sizes(load_model("llama3.1-8b"), 64) == [1, 2, 4, 8, 16, 32]
    # Qwen2-VL 7B has 28 heads and 4 key/value heads: 7 neither divides 4 nor is a multiple of it.
    assert 7 not in tensor_sizes(load_model("qwen2-vl-7b"), 56)


def test_interleaving_needs_whole_rounds() -> None:
    one = job("qwen3-0.6b", batch=24)
    for s in skeletons(one):
        count = 24 // (s.dp * s.microbatch)
        for virtual, _ in pipelines(one, s):
            assert virtual == 1 or count % s.pp == 0


def test_runnable_leaves_only_what_is_executed() -> None:
    limits = Limits(runnable=True)
    for s in skeletons(job("qwen3-30b-a3b", devices=16), limits):
        assert (s.pp, s.cp, s.ep, s.etp) == (1, 1, 1, 1)
    assert levels(job(), limits) == [("none", 0.0)]


def test_fixed_fields_have_only_that_value() -> None:
    fixed = {"tp": 2, "pp": 2, "zero": 1, "sp": True, "schedule": "1f1b", "recompute": "full", "offload": 1.0}
    limits = Limits(fixed=tuple(fixed.items()))
    one = job()
    found = skeletons(one, limits)
    assert found
    for s in found:
        assert (s.tp, s.pp) == (2, 2)
        assert zeros(one, s, limits) in ([1], []) and norm_cuts(s, limits) == [True]
        assert {name for _, name in pipelines(one, s, limits)} == {"1f1b"}
        (places,) = axis_orders(one, [s], Limits(fixed=(("order", "tp-cp-dp-pp"),)))
        assert {order for order, _ in places} == {"tp-cp-dp-pp"}
    assert levels(one, limits) == [("full", 1.0)]


def test_a_machine_without_host_memory_offloads_nothing() -> None:
    one = job()
    bare = replace(one, cluster=replace(one.cluster, memory=one.cluster.memory[:1]))
    assert {share for _, share in levels(bare)} == {0.0}


def test_all_presets_have_a_space() -> None:
    for name in model_names():
        one = job(name, devices=64, batch=64, seq=min(load_model(name).max_seq or 2048, 2048))
        assert skeletons(one), name
