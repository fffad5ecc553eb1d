"""Published sizes: presets count what their publishers say, and names are found or answered."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hyperparallel.errors import ModelError
from hyperparallel.workload.presets import foundry_mpt, gpt, load_model, model_names, model_preset

pytestmark = pytest.mark.pure

# Totals of the released weights, to the digit; they hold the sizes in published.py, not only the formulas.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "gemma2-27b": 27_227_128_320,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-7b": 8_292_166_656,
    "nemotron-3-nano": 31_577_937_344,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_total(name: str) -> None:
    assert model_preset(name).params() == PUBLISHED[name]


# Billions as the papers round them: total, active. Some leave the embedding out of the active ones, hence
# the tolerance of 6 % there.
ROUNDED = [
    ("deepseek-v3", 671, 37),
    ("kimi-k2", 1040, 32),
    ("pangu-ultra-moe-718b", 718, 39),
    ("glm-4.5", 355, 32),
    ("gpt-oss-120b", 117, 5.7),
    ("mixtral-8x22b", 141, 39),
    ("nemotron-3-super", 120, 12.5),
    ("nemotron-3-ultra", 550, 55),
    ("bloom-176b", 176, 176),
    ("gpt3-175b", 175, 175),
    ("gpt-530b", 530, 530),
    ("gpt-1t", 1008, 1008),
    ("mamba2-2.7b", 2.7, 2.7),
    ("moe-1.6t", 1600, 44),
]


@pytest.mark.parametrize(("name", "total", "active"), ROUNDED)
def test_the_rounded_total(name: str, total: float, active: float) -> None:
    model = model_preset(name)
    assert model.params() / 1e9 == pytest.approx(total, rel=0.02)
    assert model.active_params() / 1e9 == pytest.approx(active, rel=0.06)


def test_extra_predictions_of_deepseek_v3() -> None:
    """The released files hold 14 B more than the model (its README): the layer, and copies of both tables."""
    model = model_preset("deepseek-v3")
    copies = 2 * model.vocab * model.hidden
    assert model.mtp == 1
    assert (model.mtp_params + copies) / 1e9 == pytest.approx(13.5, abs=0.1)
    assert model.params(mtp=True) == model.params() + model.mtp_params
    assert replace(model, mtp=2, mtp_shared=True).mtp_params == model.mtp_params
    assert replace(model, mtp=2).mtp_params == 2 * model.mtp_params


@pytest.mark.parametrize(
    ("size", "seq", "params"),
    [
        # NumParams of llm-foundry's benchmark tables.
        ("70b", 2048, 64862437376),
        ("30b", 8192, 30019254272),
        ("13b", 2048, 12853954560),
        ("7b", 512, 6652567552),
        ("7b", 65536, 6918905856),
        ("3b", 2048, 2651837440),
        ("1b", 2048, 1315950592),
        ("760m", 2048, 760470528),
        ("350m", 2048, 355985408),
        ("125m", 2048, 125311488),
        ("125m", 65536, 174070272),
    ],
)
def test_mpt_by_sequence_length(size: str, seq: int, params: int) -> None:
    assert foundry_mpt(size, seq).params() == params


@pytest.mark.parametrize(
    ("name", "seq", "flops"),
    [
        # Model TFLOP/s over tokens/s of Megatron-Bridge's performance summaries, all with causal halves.
        ("llama3-70b", 8192, 449.2e9),
        ("llama3.1-405b", 8192, 2524.2e9),
        ("qwen3-30b-a3b", 4096, 23.0e9),
        ("qwen3-235b-a22b", 4096, 148.0e9),
        ("kimi-k2", 4096, 204.5e9),
        ("deepseek-v3", 4096, 259.9e9),
    ],
)
def test_training_flops_of_a_token_as_published(name: str, seq: int, flops: float) -> None:
    # Half a percent: the published formula leaves out routers and rounds the triangle to a half.
    ours = model_preset(name).train_flops_per_token(seq, mtp=True)
    assert ours == pytest.approx(flops, rel=0.006)


@pytest.mark.parametrize("name", ["nemotron-3-super", "nemotron-3-ultra"])
def test_training_flops_of_a_hybrid_token_as_published(name: str) -> None:
    published = {"nemotron-3-super": 84.7e9, "nemotron-3-ultra": 360.6e9}[name]
    assert model_preset(name).train_flops_per_token(8192, mtp=True) == pytest.approx(published, rel=0.02)


def test_narayanans_formula() -> None:
    """arXiv:2104.04473 equation 3, without recompute: 72 B s l h^2 (1 + s / 6h + V / 12 l h)."""
    hidden, layers, vocab, seq = 12288, 96, 51200, 2048
    formula = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert gpt(hidden, layers, 96).train_flops_per_token(seq, causal=False) == pytest.approx(formula)


def test_words_for_a_report() -> None:
    assert model_preset("deepseek-v3").words() == (
        "61 layers, hidden 7168, MLA 128 heads of 192, rank 512, 3 x gated MLP 18,432, "
        "58 x 256 experts top 8 of 2,048, shared 2,048, 1 extra prediction, 671 B parameters, 37.6 B active"
    )


def test_every_preset_is_built_with_a_source() -> None:
    for name in model_names():
        model = model_preset(name)
        assert model.source, name
        assert model.flops_per_token(1024) > 2 * model.active_params() * 0.5, name


@pytest.mark.parametrize("given", ["Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "LLAMA3.1_8b", "llama3.1-8b"])
def test_spellings(given: str) -> None:
    assert model_preset(given).name == "llama3.1-8b"


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ModelError, match=r"got 'llama4-8b'.*write llama.*-8b"):
        load_model("llama4-8b")
    with pytest.raises(ModelError, match=r"mpt size.*'8b'.*125m"):
        foundry_mpt("8b")
    with pytest.raises(ModelError, match="divisor of the hidden size 100"):
        gpt(100, 2, 7)


def test_a_name_like_no_other_is_answered_with_the_families() -> None:
    with pytest.raises(ModelError, match=r"presets begin with bloom, .*qwen") as caught:
        load_model("xyzzy")
    assert caught.value.instead is None


@pytest.mark.parametrize(
    ("given", "near"),
    [("gpt-3", ["gpt3-1.3b", "gpt3-175b"]), ("mpt", ["mpt-125m", "mpt-70b"]), ("Qwen/Qwen3", ["qwen3-8b"])],
)
def test_all_presets_that_begin_so_are_named(given: str, near: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(given)
    assert set(near) <= set(str(caught.value.instead).split(", "))


def test_mixtral_is_the_model_of_the_paper() -> None:
    assert load_model("Mixtral").name == "mixtral-8x7b"


def test_a_path_is_read_and_a_missing_one_named(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    keys = '{"model_type": "mpt", "vocab_size": 10, "d_model": 8, "n_heads": 2, "n_layers": 1}'
    (tmp_path / "tiny" / "config.json").write_text(keys)
    assert load_model(tmp_path / "tiny").name == "tiny"
    assert load_model(tmp_path / "tiny" / "config.json").source.endswith("config.json")
    with pytest.raises(ModelError, match=r"got '.*gone.json'"):
        load_model(tmp_path / "gone.json")


def test_reading_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from hyperparallel.workload.presets import model_preset;"
        "model_preset('kimi-k2').words(); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
