"""A small configuration of every family, as keys of a config.json; sizes differ, lest two agree by luck."""

from __future__ import annotations

from typing import Any

DECODER = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MOE = {**DECODER, "moe_intermediate_size": 20, "num_experts_per_tok": 2}
LATENT = {
    **MOE,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
HYBRID = {
    **MOE,
    "n_routed_experts": 8,
    "moe_shared_expert_intermediate_size": 28,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 6,
    "n_groups": 2,
    "head_dim": 10,
    "chunk_size": 8,
}
VISION = {"depth": 2, "num_heads": 4, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2}
VISION_TEXT = {**DECODER, "tie_word_embeddings": False}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def _of(family: str, base: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"model_type": family, **base, **keys}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _of("llama", DECODER),
    "llama tied, biased, own head size": _of(
        "llama", DECODER, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=10
    ),
    "llama without groups": _of("llama", {**DECODER, "num_key_value_heads": None}),
    "mistral": _of("mistral", DECODER, sliding_window=5),
    "mixtral": _of("mixtral", DECODER, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _of("qwen2", DECODER),
    "qwen2 windows": _of("qwen2", DECODER, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen2_moe": _of(
        "qwen2_moe", MOE, num_experts=6, shared_expert_intermediate_size=24, decoder_sparse_step=2
    ),
    "qwen3": _of("qwen3", DECODER, head_dim=12),
    "qwen3_moe": _of("qwen3_moe", MOE, head_dim=12, num_experts=6, mlp_only_layers=[1]),
    "qwen3_next": _of(
        "qwen3_next",
        MOE,
        num_hidden_layers=4,
        head_dim=16,
        num_experts=6,
        shared_expert_intermediate_size=24,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "gemma": _of("gemma", DECODER, head_dim=10),
    "gemma2": _of("gemma2", DECODER, head_dim=10, sliding_window=4),
    "gemma3_text": _of("gemma3_text", DECODER, head_dim=10, sliding_window=4, num_hidden_layers=7),
    "gpt2": _of("gpt2", {}, vocab_size=100, n_embd=48, n_head=6, n_layer=3, n_positions=32),
    "gpt_neox": _of("gpt_neox", DECODER),
    "gpt_neox without biases": _of("gpt_neox", DECODER, attention_bias=False),
    "gpt_oss": _of(
        "gpt_oss", DECODER, head_dim=10, num_local_experts=6, num_experts_per_tok=2, sliding_window=4
    ),
    "bloom": _of("bloom", {}, vocab_size=100, hidden_size=48, n_head=6, n_layer=3),
    "mpt": _of("mpt", {}, vocab_size=100, d_model=48, n_heads=6, n_layers=3, max_seq_len=32),
    "deepseek_v2": _of("deepseek_v2", LATENT, q_lora_rank=None, n_shared_experts=2),
    "deepseek_v3": _of("deepseek_v3", LATENT, q_lora_rank=24, n_shared_experts=1),
    "deepseek_v3 biased": _of("deepseek_v3", LATENT, q_lora_rank=24, n_shared_experts=1, attention_bias=True),
    "glm4_moe": _of(
        "glm4_moe",
        MOE,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
        head_dim=12,
    ),
    "mamba": _of("mamba", {}, vocab_size=100, hidden_size=48, state_size=6, num_hidden_layers=2),
    "mamba2": _of(
        "mamba2",
        {},
        vocab_size=100,
        hidden_size=48,
        num_heads=12,
        head_dim=8,
        state_size=6,
        n_groups=2,
        num_hidden_layers=2,
        chunk_size=8,
        use_bias=True,
    ),
    "nemotron_h": _of("nemotron_h", HYBRID, hybrid_override_pattern="ME*-M", num_hidden_layers=5),
    "nemotron_h latent": _of(
        "nemotron_h",
        HYBRID,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        num_hidden_layers=4,
        moe_latent_size=14,
    ),
    "vit": _of(
        "vit",
        {},
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=80,
        image_size=16,
        patch_size=4,
    ),
    "vit classifier": _of(
        "vit",
        {},
        architectures=["ViTForImageClassification"],
        id2label={str(i): str(i) for i in range(7)},
        label2id={str(i): i for i in range(7)},
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=80,
        image_size=16,
        patch_size=4,
        qkv_bias=False,
    ),
    "llava": {
        "model_type": "llava",
        "tie_word_embeddings": False,
        "text_config": {**DECODER, "model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "image_size": 16,
            "patch_size": 4,
            "projection_dim": 32,
        },
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "tie_word_embeddings": False,
        "text_config": {**VISION_TEXT, "model_type": "qwen2_vl_text", "rope_parameters": ROPE},
        "vision_config": {**VISION, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 4},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "text_config": {**VISION_TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": ROPE},
        "vision_config": {
            **VISION,
            "hidden_size": 32,
            "out_hidden_size": 48,
            "intermediate_size": 56,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
    },
}

DIT = {
    "_class_name": "DiTTransformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "patch_size": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 10,
}
