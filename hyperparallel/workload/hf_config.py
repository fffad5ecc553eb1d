"""Read a published model configuration (config.json) as a `Model`, without the library that wrote it.

The family is the key `model_type` (Hugging Face) or `_class_name` (Diffusers); each family is one function
in `families/`. Only facts that decide cost are read: sizes, biases, norms, windows, experts. A tested
family's parameter count equals that of the library's own module exactly (tests/workload).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperparallel.errors import ModelError, Words, nearest
from hyperparallel.workload.families import decoders, experts, hybrids, vision
from hyperparallel.workload.families.fields import Fields
from hyperparallel.workload.model import Model

FAMILIES: dict[str, Callable[[Fields, str], Model]] = {
    "bloom": decoders.bloom,
    "deepseek_v2": experts.deepseek,
    "deepseek_v3": experts.deepseek,
    "gemma": decoders.gemma,
    "gemma2": decoders.gemma2,
    "gemma3_text": decoders.gemma3,
    "glm4_moe": experts.glm4_moe,
    "gpt2": decoders.gpt2,
    "gpt_neox": decoders.gpt_neox,
    "gpt_oss": experts.gpt_oss,
    "kimi_k2": experts.deepseek,
    "llama": decoders.llama,
    "llava": vision.llava,
    "mamba": hybrids.mamba,
    "mamba2": hybrids.mamba2,
    "mistral": decoders.mistral,
    "mixtral": experts.mixtral,
    "mpt": decoders.mpt,
    "nemotron_h": hybrids.nemotron_h,
    "qwen2": decoders.qwen2,
    "qwen2_5_vl": vision.qwen2_5_vl,
    "qwen2_moe": experts.qwen2_moe,
    "qwen2_vl": vision.qwen2_vl,
    "qwen3": decoders.qwen3,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_next": hybrids.qwen3_next,
    "vit": vision.vit,
    "DiTTransformer2DModel": vision.dit,
    "Transformer2DModel": vision.dit,
}


def read_model(path: str | Path) -> Model:
    """The model described by a config.json, or by a folder that holds one.

    Raises `ModelError` for a file that is missing or no JSON object, for an unknown family (with near
    names) and for a key that is missing or impossible.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError("model", str(path), "a config.json, or a folder that holds one") from error
    except json.JSONDecodeError as error:
        place = Words(f"{file}, line {error.lineno}, column {error.colno}")
        raise ModelError("model", place, f"a readable JSON file ({error.msg})") from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ModelError("model", str(file), f"a readable JSON file ({why})") from error
    if not isinstance(config, dict):
        raise ModelError(f"model {file}", type(config).__name__, "a JSON object of configuration keys")
    name = file.parent.name if file.name == "config.json" else file.stem
    return replace(model_from_config(config, name or "model", str(file)), source=str(file))


def model_from_config(config: Mapping[str, Any], name: str, where: str = "config") -> Model:
    """The model that a configuration's keys describe; `where` names it in messages.

    >>> keys = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
    >>> model_from_config({**keys, "n_positions": 1024, "vocab_size": 50257}, "gpt2").params()
    124439808
    """
    fields = Fields(config, where)
    family = config.get("model_type") or config.get("_class_name")
    if family is None:
        raise fields.missing(("model_type", "_class_name"), "the family of the model")
    if not isinstance(family, str) or family not in FAMILIES:
        allowed = f"one of {', '.join(sorted(FAMILIES))}"
        raise ModelError(f"{where}: model_type", family, allowed, nearest(str(family), FAMILIES, 1))
    return FAMILIES[family](fields, name)
