"""Tiny random models of each Hugging Face family, with a batch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCAB, BATCH, SEQ = 96, 2, 12
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (BATCH, SEQ))
    return {"input_ids": ids, "labels": ids.clone()}


def masked() -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[0, -3:] = 0
    return {**tokens(), "attention_mask": mask}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([1, 0])}


def llama(layers: int, **more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=layers, **DECODER, **more))


def qwen3(layers: int, **more: Any) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(num_hidden_layers=layers, **DECODER, **more))


def mistral(layers: int, **more: Any) -> nn.Module:
    settings = {"sliding_window": 4, **DECODER, **more}
    return hf.MistralForCausalLM(hf.MistralConfig(num_hidden_layers=layers, **settings))


def gemma(layers: int, **more: Any) -> nn.Module:
    settings = {"pad_token_id": 0, **DECODER, **more}
    return hf.GemmaForCausalLM(hf.GemmaConfig(num_hidden_layers=layers, **settings))


def gemma2(layers: int, **more: Any) -> nn.Module:
    settings = {"pad_token_id": 0, "sliding_window": 4, **DECODER, **more}
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(num_hidden_layers=layers, **settings))


def gpt2(layers: int, dropout: float = 0.0, **more: Any) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        **more,
    )
    return hf.GPT2LMHeadModel(config)


def bert(layers: int, dropout: float = 0.0, **more: Any) -> nn.Module:
    config = hf.BertConfig(
        num_hidden_layers=layers,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **COMMON,
        **more,
    )
    return hf.BertForMaskedLM(config)


def vit(layers: int, dropout: float = 0.0, **more: Any) -> nn.Module:
    config = hf.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **more,
    )
    return hf.ViTForImageClassification(config)


FAMILIES: dict[str, tuple[Callable[..., nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "llama": (llama, tokens),
    "qwen3": (qwen3, tokens),
    "mistral": (mistral, tokens),
    "gemma": (gemma, tokens),
    "gemma2": (gemma2, tokens),
    "gpt2": (gpt2, tokens),
    "bert": (bert, masked),
    "vit": (vit, images),
}


def seeded(family: str, layers: int, **more: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of `family` in training mode and a batch, the same at every call."""
    torch.manual_seed(0)
    build, batch = FAMILIES[family]
    return build(layers, **more).train(), batch()
