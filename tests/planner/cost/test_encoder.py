"""Encoders in front of a model: their parameters, FLOPs and activations by hand, and where they weigh."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.encoder import front_of
from hyperparallel.planner.cost.memory import first_chunk_held, memory_of
from hyperparallel.planner.cost.price import step_seconds
from hyperparallel.planner.cost.rows import Rows
from hyperparallel.planner.search.table import predict
from hyperparallel.planner.step.balance import balanced
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.simulated_step import simulated_step
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.workload.hf_config import model_from_config
from hyperparallel.workload.linear import total_flops
from hyperparallel.workload.model import Model
from hyperparallel.workload.presets import load_model
from tests.planner.sample import job
from tests.workload.configs import CONFIGS

pytestmark = pytest.mark.pure
NAME, SEQ, BATCH = "qwen2-vl-7b", 2048, 64


def rows(model: Model, *strategies: Strategy) -> Rows:
    return rows_of(model, job(devices=8).cluster, SEQ, float(BATCH), Candidates.of(strategies))


def models() -> dict[str, Model]:
    """Those whose counts equal transformers' modules (tests/workload/test_params.py), and the preset."""
    made = {name: model_from_config(CONFIGS[name], name) for name in ("qwen2_vl", "qwen2_5_vl", "llava")}
    return {**made, NAME: load_model(NAME)}


@pytest.mark.parametrize("name", list(models()))
def test_one_rank_holds_every_parameter(name: str) -> None:
    model = models()[name]
    r = rows(model, Strategy(dp=8)).row
    # Biases of norms and of products are counted by the model alone, less than 0.2 % here.
    assert float(r["params"][0]) == pytest.approx(model.params(), rel=0.02 if name != NAME else 2e-3)
    bare = rows(replace(model, encoders=()), Strategy(dp=8), Strategy(pp=2, dp=4)).row
    both = rows(model, Strategy(dp=8), Strategy(pp=2, dp=4)).row
    encoders = sum(part.params for part in model.encoders)
    assert both["params"] - bare["params"] == pytest.approx(encoders, rel=1e-6)  # whole on the first stage


def test_forward_flops_are_those_of_the_facts() -> None:
    model = load_model(NAME)
    (part,) = model.encoders
    front = front_of(model, Candidates.of([Strategy()]))
    layers = sum(float(np.sum(work.flops())) * count for work, count, _ in front.passes[:-1:3])
    stem = part.tokens * total_flops(part.model.stem, part.tokens)
    projector = part.tokens_out * total_flops(part.projector, part.tokens_out)
    assert layers + stem + projector == pytest.approx(part.flops(), rel=1e-9)
    # The image needs no gradient, so the stem costs two products and the projector three.
    assert float(np.sum(front.passes[-1][0].flops())) == pytest.approx(2 * stem + 3 * projector)


def test_activations_are_those_of_a_transformer_layer() -> None:
    """Korthikanti et al. count 34 bytes an element of s b h, 2 of them dropout masks; fused attention keeps
    one number of 4 bytes for each row and head."""
    model = load_model(NAME)
    (part,) = model.encoders
    encoder = part.model
    hidden, tokens = encoder.hidden, part.tokens
    attention = encoder.kinds[0][0].attention
    assert attention is not None
    layer = 32 * tokens * hidden + 4 * tokens * attention.heads
    ends = 2 * tokens * encoder.stem[0].inputs + 2 * part.tokens_out * sum(x.inputs for x in part.projector)
    saved = float(np.sum(front_of(model, Candidates.of([Strategy()])).saved_bytes))
    assert saved == pytest.approx(encoder.num_layers * layer + ends)


def test_first_stages_hold_more_microbatches_of_them() -> None:
    p, m = np.array([4.0, 4.0, 4.0]), np.array([16.0, 16.0, 16.0])
    assert first_chunk_held(p, m, np.array([1.0, 2.0, 1.0]), np.array([0, 0, 1])).tolist() == [4, 8, 16]
    model = replace(load_model(NAME), vocab=1024)  # the first stage is the fullest
    strategies = [Strategy(pp=4, dp=2), Strategy(pp=4, dp=2, recompute="full")]
    whole, bare = (memory_of(rows(one, *strategies)) for one in (model, replace(model, encoders=())))
    saved = front_of(model, Candidates.of(strategies)).saved_bytes
    assert whole.activations - bare.activations == pytest.approx(4 * np.asarray(saved))


def test_the_first_stage_is_longer_and_others_wait_for_it() -> None:
    model = replace(load_model(NAME), vocab=1024)  # a small head, so that the first stage is the longest
    constants = Constants()
    strategy = Strategy(pp=4, dp=2, overlap=False)
    full = rows(model, strategy)
    whole = step_seconds(full, constants)
    bare = step_seconds(rows(replace(model, encoders=()), strategy), constants)
    alone = step_seconds(rows(model, Strategy(dp=8, overlap=False)), constants)
    without = step_seconds(rows(replace(model, encoders=()), Strategy(dp=8, overlap=False)), constants)
    each = float(alone.compute[0] - without.compute[0]) / (BATCH / 8)
    assert float(whole.seconds[0] - bare.seconds[0]) == pytest.approx(BATCH / 2 * each, rel=0.1)


def test_closed_form_simulation_and_balance_agree() -> None:
    one = job(NAME, devices=8, batch=BATCH, seq=SEQ)
    strategy = Strategy(pp=4, dp=2)
    (closed,) = predict(one, [strategy], Constants())
    prices = LayerPrices(one, strategy, Constants())
    even = simulated_step(one, strategy, prices=prices)
    assert even.seconds == pytest.approx(closed.seconds, rel=0.05)
    split = balanced(prices)
    assert split is not None and split.counts()[0] < max(split.counts())  # layers leave the first stage
    assert simulated_step(one, strategy, split, prices=prices).seconds < even.seconds
