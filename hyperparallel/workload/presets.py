"""Models by name: published ones, and the GPT and MPT families by size.

`load_model` takes what a command line takes: a name, or the path of a config.json or its folder. Names are
compared without case, dashes and an owner in front, so that "meta-llama/Llama-3.1-8B" is "llama3.1-8b".
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperparallel.errors import ModelError, nearest
from hyperparallel.workload.attention import Attention
from hyperparallel.workload.hf_config import model_from_config, read_model
from hyperparallel.workload.layer import Layer
from hyperparallel.workload.mlp import Mlp
from hyperparallel.workload.model import Model
from hyperparallel.workload.published import PUBLISHED

GPT_SIZES: dict[str, tuple[int, int, int, str]] = {
    "gpt2-xl": (1600, 48, 25, "openai-community/gpt2-xl"),
    "gpt3-1.3b": (2048, 24, 16, "arXiv:2005.14165 table 2.1, heads of 128"),
    "gpt3-2.7b": (2560, 32, 32, "arXiv:2005.14165 table 2.1"),
    "gpt3-6.7b": (4096, 32, 32, "arXiv:2005.14165 table 2.1"),
    "gpt3-13b": (5120, 40, 40, "arXiv:2005.14165 table 2.1, hidden a multiple of the heads"),
    "gpt3-175b": (12288, 96, 96, "arXiv:2005.14165 table 2.1"),
    "gpt-22b": (6144, 48, 64, "arXiv:2205.05198 table 3"),
    "gpt-175b": (12288, 96, 96, "arXiv:2205.05198 table 3"),
    "gpt-530b": (20480, 105, 128, "arXiv:2205.05198 table 3"),
    "gpt-1t": (25600, 128, 160, "arXiv:2205.05198 table 3"),
}
"""Hidden size, layers, heads, source. Names that begin with gpt- have Megatron's vocabulary of 51,200."""

MPT_SIZES: dict[str, tuple[int, int, int]] = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Hidden size, layers, heads of the models in llm-foundry's benchmark tables (scripts/train/benchmarking)."""

ALIASES = {"mixtral": "mixtral-8x7b"}
"""Names that people write for one preset: arXiv:2401.04088, "Mixtral of Experts", is that model."""

TRAINED_AS: dict[str, dict[str, Any]] = {
    name: {"mtp": 2, "mtp_shared": True}
    for name in ("nemotron-3-super", "nemotron-3-ultra", "nemotron-3.5-lightning")
}
"""What a recipe trains beyond the configuration file: the one extra block predicts twice, as Megatron-Bridge
sets for Super (nemotron_3_super recipe) and as its published FLOPs for each token say of the other two."""


def gpt(
    hidden: int, layers: int, heads: int, vocab: int = 51200, seq: int = 2048, name: str = "", ffn: int = 0
) -> Model:
    """A GPT as Megatron trains it: learned positions, biases, tied embedding, feed-forward 4 h (or `ffn`).

    >>> gpt(12288, 96, 96).words()
    '96 layers, hidden 12288, MHA 96 heads of 128, MLP 49,152, 175 B parameters'
    """
    if hidden % heads:
        raise ModelError("heads", heads, f"a divisor of the hidden size {hidden}")
    attention = Attention(heads, hidden // heads, bias=True, out_bias=True)
    layer = Layer(attention, Mlp(ffn or 4 * hidden, gated=False, bias=True))
    return Model(
        name or f"gpt-{hidden}x{layers}",
        hidden,
        vocab,
        ((layer, layers),),
        tied=True,
        positions=seq,
        max_seq=seq,
        dropout=0.1,
        norm="layer",
    )


def foundry_mpt(size: str, seq: int = 2048) -> Model:
    """An MPT as in llm-foundry's benchmarks: a GPT with a vocabulary of 50,368 and `seq` positions.

    >>> foundry_mpt("7b").params()
    6658859008
    """
    if size not in MPT_SIZES:
        raise ModelError("mpt size", size, f"one of {', '.join(MPT_SIZES)}", nearest(size, MPT_SIZES, 1))
    model = gpt(*MPT_SIZES[size], vocab=50368, seq=seq, name=f"mpt-{size}")
    return replace(model, dropout=0.0, source="llm-foundry scripts/train/benchmarking")


def model_names() -> tuple[str, ...]:
    """Every name that `model_preset` knows."""
    return (*PUBLISHED, *GPT_SIZES, *(f"mpt-{size}" for size in MPT_SIZES))


def model_preset(name: str) -> Model:
    """The model of a name; raises `ModelError` with near names for one that is not known.

    >>> model_preset("Qwen/Qwen3-30B-A3B").params()
    30532122624
    """
    found = preset_name(name)
    if found is None:
        raise _unknown(name)
    if found in PUBLISHED:
        keys, source = PUBLISHED[found]
        model = replace(model_from_config(keys, found), source=source)
        return replace(model, **TRAINED_AS.get(found, {}))
    if found in GPT_SIZES:
        hidden, layers, heads, source = GPT_SIZES[found]
        vocab = 51200 if found.startswith("gpt-") else 50257
        seq = 1024 if found.startswith("gpt2") else 2048
        return replace(gpt(hidden, layers, heads, vocab, seq, found), source=source)
    return foundry_mpt(found.removeprefix("mpt-"))


def preset_name(name: str) -> str | None:
    """The name of a preset in its own spelling; None where there is none of that name.

    >>> preset_name("Qwen/Qwen3-30B-A3B"), preset_name("xyzzy")
    ('qwen3-30b-a3b', None)
    """
    known = {_plain(one): one for one in (*model_names(), *ALIASES)}
    found = known.get(_plain(name)) or known.get(_plain(name.rsplit("/", 1)[-1]))
    return ALIASES.get(found, found) if found is not None else None


def _unknown(name: str) -> ModelError:
    """The error for an unknown model: presets that begin so or are spelt alike, else the families."""
    wanted = name.rsplit("/", 1)[-1]
    start = _plain(wanted)
    begin = [one for one in model_names() if start and _plain(one).startswith(start)]
    near = ", ".join(begin) or nearest(wanted, model_names())
    allowed = "a preset, a config.json or its folder"
    if near is None:
        families = dict.fromkeys(re.match("[a-z]+", one)[0] for one in sorted(model_names()))  # type: ignore[index]
        allowed += f"; presets begin with {', '.join(families)} (one of these alone lists its presets)"
    return ModelError("model", name, allowed, near)


def load_model(model: str | Path) -> Model:
    """A model by preset name, or by the path of a config.json or of a folder that holds one."""
    path = Path(model)
    if path.exists() or path.suffix == ".json":
        return read_model(path)
    return model_preset(str(model))


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char not in "-_ /")
