"""Mixtures of experts: Mixtral, Qwen MoE, DeepSeek-V2/V3 and Kimi-K2, GLM-4 MoE, GPT-OSS.

They differ in which layers are dense (the first k, or all but every n-th), in shared experts, and in
biases. Offsets that balance the load without a gradient (DeepSeek-V3's) are buffers, no parameters.
"""

from __future__ import annotations

from dataclasses import replace

from hyperparallel.errors import ModelError
from hyperparallel.workload.attention import Attention
from hyperparallel.workload.families.decoders import (
    alternating,
    decoder,
    depth,
    grouped,
    qwen_attention,
    windowed,
)
from hyperparallel.workload.families.fields import Fields
from hyperparallel.workload.layer import Layer
from hyperparallel.workload.mlp import Mlp, Moe
from hyperparallel.workload.model import Model


def mixture(fields: Fields, *, width: str, experts: tuple[str, ...], default_topk: int | None = None) -> Moe:
    """Routed experts from the usual keys; `width` and `experts` name the keys of the family."""
    count = fields.size(*experts)
    topk = fields.size("num_experts_per_tok", default=default_topk)
    if topk > count:
        raise ModelError(f"{fields.where}: num_experts_per_tok", topk, f"at most the {count} experts")
    return Moe(count, topk, fields.size(width))


def mixtral(fields: Fields, name: str) -> Model:
    """Mixtral: every layer a mixture."""
    attention = windowed(grouped(fields, kv_heads=8), fields.count("sliding_window"))
    moe = mixture(fields, width="intermediate_size", experts=("num_local_experts",), default_topk=2)
    return decoder(fields, name, [Layer(attention, moe)] * depth(fields))


def qwen3_moe(fields: Fields, name: str) -> Model:
    """Qwen3 MoE: no shared expert."""
    bias = fields.flag("attention_bias", False)
    attention = grouped(fields, bias=bias, out_bias=bias, qk_norm=True, kv_heads=4)
    window = fields.count("sliding_window") if fields.flag("use_sliding_window", False) else 0
    moe = mixture(fields, width="moe_intermediate_size", experts=("num_experts", "num_local_experts"))
    parts = sparse_layers(fields, moe)
    return decoder(fields, name, [Layer(windowed(attention, window), part) for part in parts])


def qwen2_moe(fields: Fields, name: str) -> Model:
    """Qwen2 MoE: a shared expert behind a gate of its own."""
    moe = mixture(fields, width="moe_intermediate_size", experts=("num_experts", "num_local_experts"))
    moe = replace(moe, shared_width=fields.size("shared_expert_intermediate_size"), shared_gate=True)
    attention = qwen_attention(fields, grouped(fields, bias=fields.flag("qkv_bias", True)))
    parts = sparse_layers(fields, moe)
    return decoder(fields, name, [Layer(one, part) for one, part in zip(attention, parts, strict=True)])


def sparse_layers(fields: Fields, moe: Moe) -> list[Mlp | Moe]:
    """The feed-forward part of each layer: a mixture in every n-th layer that mlp_only_layers spares."""
    dense = Mlp(fields.size("intermediate_size", default=1))
    step = fields.size("decoder_sparse_step", default=1)
    spared = fields.sizes("mlp_only_layers")
    found: list[Mlp | Moe] = []
    for index in range(depth(fields)):
        sparse = index not in spared and (index + 1) % step == 0
        if not sparse:
            fields.size("intermediate_size")  # a dense layer needs the key
        found.append(moe if sparse else dense)
    return found


def latent_attention(fields: Fields) -> Attention:
    """Multi-head latent attention from DeepSeek's keys."""
    bias = fields.flag("attention_bias", False)
    rope = fields.size("qk_rope_head_dim")
    return Attention(
        fields.size("num_attention_heads"),
        fields.size("qk_nope_head_dim") + rope,
        kind="mla",
        value_dim=fields.size("v_head_dim"),
        q_rank=fields.count("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        rope_dim=rope,
        rank_bias=bias,
        out_bias=bias,
    )


def deepseek(fields: Fields, name: str) -> Model:
    """DeepSeek-V2, V3 and Kimi-K2: latent attention, the first layers dense, shared experts."""
    return _first_dense(fields, name, latent_attention(fields), fields.flag("mlp_bias", False))


def glm4_moe(fields: Fields, name: str) -> Model:
    """GLM-4.5: DeepSeek's mixture with grouped-query attention."""
    bias = fields.flag("attention_bias", False)
    attention = grouped(fields, bias=bias, qk_norm=fields.flag("use_qk_norm", False), kv_heads=8)
    return _first_dense(fields, name, attention, bias=False)


def _first_dense(fields: Fields, name: str, attention: Attention, bias: bool) -> Model:
    moe = mixture(fields, width="moe_intermediate_size", experts=("n_routed_experts",))
    shared = fields.count("n_shared_experts") * moe.width
    moe = replace(moe, shared_width=shared, shared_bias=bias)
    dense, number = Mlp(fields.size("intermediate_size"), bias=bias), depth(fields)
    first = min(fields.count("first_k_dense_replace"), number)
    step = fields.size("moe_layer_freq", default=1)
    layers = [
        Layer(attention, moe if index >= first and index % step == 0 else dense) for index in range(number)
    ]
    mtp = fields.count("num_nextn_predict_layers", "num_mtp_layers")
    return replace(decoder(fields, name, layers), mtp=mtp)


def gpt_oss(fields: Fields, name: str) -> Model:
    """GPT-OSS: biases everywhere, a learned sink for each head, every second layer through a window."""
    bias = fields.flag("attention_bias", True)
    attention = replace(grouped(fields, bias=bias, out_bias=bias, kv_heads=8), sinks=True)
    moe = mixture(fields, width="intermediate_size", experts=("num_local_experts",), default_topk=4)
    moe = replace(moe, bias=True, router_bias=True, clamped=True)
    layers = [Layer(one, moe) for one in alternating(fields, attention, every=2)]
    return decoder(fields, name, layers)
