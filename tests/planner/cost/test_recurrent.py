"""Recurrent layers cut along the sequence: what pieces tell one another, and what that costs."""

from __future__ import annotations

import numpy as np
import pytest

from hyperparallel.planner.cost.layer import CP_PIECES, layer_work
from hyperparallel.planner.search.search import search
from hyperparallel.planner.search.space import context_sizes
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.workload.presets import load_model
from hyperparallel.workload.recurrent import StateSpace
from tests.planner.sample import job

pytestmark = pytest.mark.pure
HEADS, DIM, STATE, TOKENS = 2, 3, 4, 24


def recurrence(form: str, rng: np.random.Generator):  # type: ignore[no-untyped-def]
    """(what each token leaves of the state, what it adds), as the papers write them: [tokens, heads, ...]."""
    added = rng.normal(size=(TOKENS, HEADS, DIM, STATE))
    if form == "mamba":  # a diagonal matrix for every channel
        return rng.uniform(0.5, 1.0, (TOKENS, HEADS, DIM, STATE)), added, np.multiply
    if form == "mamba2":  # one number for every head
        return rng.uniform(0.5, 1.0, (TOKENS, HEADS, 1, 1)), added, np.multiply
    keys = rng.normal(size=(TOKENS, HEADS, STATE))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    strength = rng.uniform(0.0, 1.0, (TOKENS, HEADS, 1, 1))
    left = rng.uniform(0.5, 1.0, (TOKENS, HEADS, 1, 1)) * (
        np.eye(STATE) - strength * keys[..., :, None] * keys[..., None, :]
    )
    return left, added, np.matmul


@pytest.mark.parametrize("form", ["mamba", "mamba2", "delta"])
@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_summaries_of_pieces_give_every_state(form: str, pieces: int) -> None:
    """Each piece on its own, from nothing; then its first state from the summaries before it alone."""
    left, added, after = recurrence(form, np.random.default_rng(1))
    states = [np.zeros((HEADS, DIM, STATE))]
    for one, more in zip(left, added, strict=True):
        states.append(after(states[-1], one) + more)
    length = TOKENS // pieces
    summaries = []
    for first in range(0, TOKENS, length):
        state = np.zeros((HEADS, DIM, STATE))
        whole = np.ones_like(left[0]) if form != "delta" else np.broadcast_to(np.eye(STATE), left[0].shape)
        for one, more in zip(left[first : first + length], added[first : first + length], strict=True):
            state, whole = after(state, one) + more, after(whole, one)
        summaries.append((whole, state))
    begin = np.zeros((HEADS, DIM, STATE))
    for index, (whole, state) in enumerate(summaries):
        assert begin == pytest.approx(states[index * length])
        begin = after(begin, whole) + state
    mixer = StateSpace(form, HEADS, DIM, STATE)  # type: ignore[arg-type]
    assert mixer.summary == sum(part.size for part in summaries[0])


@pytest.mark.parametrize("name", ["mamba2-2.7b", "qwen3-next-80b-a3b", "nemotron-3-nano"])
def test_messages_are_the_summaries_of_all_pieces(name: str) -> None:
    model = load_model(name)
    layer = next(one for one, _ in model.kinds if isinstance(one.attention, StateSpace))
    mixer = layer.attention
    assert isinstance(mixer, StateSpace)
    many = Candidates.of([Strategy(cp=cp, tp=tp, microbatch=2) for cp in (1, 2, 8) for tp in (1, 2)])
    work = layer_work(layer, model, 65536, many)
    sent = {m.kind: m for m in work.forward.messages if m.axis == "cp"}
    for i in range(len(many)):
        s = many[i]
        times = np.broadcast_to(sent["all_gather"].times, len(many))[i]
        assert times == (s.cp > 1)
        if s.cp > 1:
            wanted = 4 * mixer.summary / s.tp * 2 * (2 * s.cp)  # 32 bits, two samples, two pieces a rank
            assert sent["all_gather"].num_bytes[i] == pytest.approx(wanted)  # type: ignore[index]
            halo = 2 * 3 * mixer.conv_channels / s.tp * 2 * CP_PIECES
            assert sent["send"].num_bytes[i] == pytest.approx(halo)  # type: ignore[index]


def test_work_is_cut_and_little_is_added() -> None:
    """A long sample of a pure state-space model: the products of a rank shrink with cp, exactly."""
    model = load_model("mamba2-2.7b")
    layer = model.kinds[0][0]
    one, eight = (
        layer_work(layer, model, 65536, Candidates.of([Strategy(cp=cp)])).forward.flops()[0]  # type: ignore[index]
        for cp in (1, 8)
    )
    assert eight == pytest.approx(one / 8, rel=1e-9)


def test_long_samples_of_recurrent_models_are_cut_along_the_sequence() -> None:
    one = job("mamba2-2.7b", devices=64, seq=262144, batch=8)
    assert context_sizes(one, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert search(one).best[0].strategy.cp > 1
