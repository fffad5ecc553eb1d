"""Published models as the keys of their own config.json: facts only, each with the place it stands.

Keys that do not change a count are left out. A Hugging Face name in `SOURCES` means that model's
config.json. What is not published is said in the source and derived from sizes that are.
"""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]


def _decoder(family: str, vocab: int, shape: tuple[int, int, int, int, int], seq: int, **keys: Any) -> Keys:
    """A decoder from (hidden, feed-forward width, layers, heads, key/value heads)."""
    hidden, width, layers, heads, kv_heads = shape
    return {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": seq,
        **keys,
    }


def _llama(vocab: int, shape: tuple[int, int, int, int, int], seq: int) -> Keys:
    return _decoder("llama", vocab, shape, seq)


def _qwen3(shape: tuple[int, int, int, int, int], tied: bool = False) -> Keys:
    return _decoder("qwen3", 151936, shape, 40960, head_dim=128, tie_word_embeddings=tied)


def _latent(family: str, vocab: int, shape: tuple[int, int, int, int], seq: int, **keys: Any) -> Keys:
    """Latent attention with DeepSeek's sizes, from (hidden, dense width, layers, heads)."""
    hidden, width, layers, heads = shape
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return _decoder(family, vocab, (hidden, width, layers, heads, heads), seq, **{**latent, **keys})


def _moe(experts: int, topk: int, width: int, shared: int, first: int) -> Keys:
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "first_k_dense_replace": first,
    }


def _nemotron(hidden: int, pattern: str, heads: int, mamba_heads: int, **keys: Any) -> Keys:
    return {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "max_position_embeddings": 262144,
        **keys,
    }


def _qwen_vl(family: str, text: Keys, **vision: Any) -> Keys:
    sizes = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
    return {"model_type": family, "text_config": text, "vision_config": {**sizes, **vision}}


QWEN2_7B = _decoder("qwen2", 152064, (3584, 18944, 28, 28, 4), 32768)
QWEN2_72B = _decoder("qwen2", 152064, (8192, 29568, 80, 64, 8), 32768)
NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NANO = _nemotron(2688, NANO_PATTERN, 32, 64) | {
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"

PUBLISHED: dict[str, tuple[Keys, str]] = {
    "llama-65b": (_llama(32000, (8192, 22016, 80, 64, 64), 2048), "arXiv:2302.13971 table 2"),
    "llama2-7b": (_llama(32000, (4096, 11008, 32, 32, 32), 4096), "meta-llama/Llama-2-7b-hf"),
    "llama2-13b": (_llama(32000, (5120, 13824, 40, 40, 40), 4096), "meta-llama/Llama-2-13b-hf"),
    "llama2-70b": (_llama(32000, (8192, 28672, 80, 64, 8), 4096), "meta-llama/Llama-2-70b-hf"),
    "codellama-34b": (_llama(32000, (8192, 22016, 48, 64, 8), 16384), "codellama/CodeLlama-34b-hf"),
    "llama3-8b": (_llama(128256, (4096, 14336, 32, 32, 8), 8192), "meta-llama/Meta-Llama-3-8B"),
    "llama3-70b": (_llama(128256, (8192, 28672, 80, 64, 8), 8192), "meta-llama/Meta-Llama-3-70B"),
    "llama3.1-8b": (_llama(128256, (4096, 14336, 32, 32, 8), 131072), "meta-llama/Llama-3.1-8B"),
    "llama3.1-70b": (_llama(128256, (8192, 28672, 80, 64, 8), 131072), "meta-llama/Llama-3.1-70B"),
    "llama3.1-405b": (_llama(128256, (16384, 53248, 126, 128, 8), 131072), "meta-llama/Llama-3.1-405B"),
    "mistral-7b": (
        _decoder("mistral", 32000, (4096, 14336, 32, 32, 8), 32768, sliding_window=4096),
        "mistralai/Mistral-7B-v0.1",
    ),
    "mixtral-8x7b": (
        _decoder("mixtral", 32000, (4096, 14336, 32, 32, 8), 32768, num_local_experts=8),
        "mistralai/Mixtral-8x7B-v0.1",
    ),
    "mixtral-8x22b": (
        _decoder("mixtral", 32000, (6144, 16384, 56, 48, 8), 65536, num_local_experts=8),
        "mistralai/Mixtral-8x22B-v0.1",
    ),
    "qwen1.5-32b": (_decoder("qwen2", 152064, (5120, 27392, 64, 40, 8), 32768), "Qwen/Qwen1.5-32B"),
    "qwen1.5-72b": (_decoder("qwen2", 152064, (8192, 24576, 80, 64, 64), 32768), "Qwen/Qwen1.5-72B"),
    "qwen2-7b": (QWEN2_7B, "Qwen/Qwen2-7B"),
    "qwen2-72b": (QWEN2_72B, "Qwen/Qwen2-72B"),
    "qwen3-0.6b": (_qwen3((1024, 3072, 28, 16, 8), tied=True), "Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": (_qwen3((2048, 6144, 28, 16, 8), tied=True), "Qwen/Qwen3-1.7B"),
    "qwen3-4b": (_qwen3((2560, 9728, 36, 32, 8), tied=True), "Qwen/Qwen3-4B"),
    "qwen3-8b": (_qwen3((4096, 12288, 36, 32, 8)), "Qwen/Qwen3-8B"),
    "qwen3-14b": (_qwen3((5120, 17408, 40, 40, 8)), "Qwen/Qwen3-14B"),
    "qwen3-32b": (_qwen3((5120, 25600, 64, 64, 8)), "Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": (
        _qwen3((2048, 6144, 48, 32, 4))
        | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768},
        "Qwen/Qwen3-30B-A3B",
    ),
    "qwen3-235b-a22b": (
        _qwen3((4096, 12288, 94, 64, 4))
        | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 1536},
        "Qwen/Qwen3-235B-A22B",
    ),
    "qwen3-next-80b-a3b": (
        _decoder("qwen3_next", 151936, (2048, 5120, 48, 16, 2), 262144, head_dim=256)
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
    ),
    "deepseek-v2-lite": (
        _latent("deepseek_v2", 102400, (2048, 10944, 27, 16), 163840, q_lora_rank=None)
        | _moe(64, 6, 1408, shared=2, first=1),
        "deepseek-ai/DeepSeek-V2-Lite",
    ),
    "deepseek-v2": (
        _latent("deepseek_v2", 102400, (5120, 12288, 60, 128), 163840) | _moe(160, 6, 1536, 2, first=1),
        "deepseek-ai/DeepSeek-V2",
    ),
    "deepseek-v3": (
        _latent("deepseek_v3", 129280, (7168, 18432, 61, 128), 163840, num_nextn_predict_layers=1)
        | _moe(256, 8, 2048, shared=1, first=3),
        "deepseek-ai/DeepSeek-V3",
    ),
    "kimi-k2": (
        _latent("kimi_k2", 163840, (7168, 18432, 61, 64), 131072) | _moe(384, 8, 2048, shared=1, first=1),
        "moonshotai/Kimi-K2-Base",
    ),
    "pangu-ultra-moe-718b": (
        _latent("deepseek_v3", 153600, (7680, 18432, 61, 128), 131072)
        | _moe(256, 8, 2048, shared=1, first=3),
        "arXiv:2505.04519: layers, hidden size, experts; heads, ranks and first layers as DeepSeek-V3",
    ),
    "moe-1.6t": (
        _latent("deepseek_v3", 153600, (7680, 18432, 61, 128), 131072)
        | _moe(512, 8, 2304, shared=1, first=3),
        "no published model: Pangu Ultra MoE with more and wider experts, sized to 1.6 T parameters",
    ),
    "glm-4.5": (
        _decoder("glm4_moe", 151552, (5120, 12288, 92, 96, 8), 131072, head_dim=128, attention_bias=True)
        | {"use_qk_norm": True, "num_nextn_predict_layers": 1}
        | _moe(160, 8, 1536, shared=1, first=3),
        "zai-org/GLM-4.5",
    ),
    "gpt-oss-20b": (
        _decoder("gpt_oss", 201088, (2880, 2880, 24, 64, 8), 131072, head_dim=64, num_local_experts=32)
        | {"num_experts_per_tok": 4, "sliding_window": 128},
        "openai/gpt-oss-20b",
    ),
    "gpt-oss-120b": (
        _decoder("gpt_oss", 201088, (2880, 2880, 36, 64, 8), 131072, head_dim=64, num_local_experts=128)
        | {"num_experts_per_tok": 4, "sliding_window": 128},
        "openai/gpt-oss-120b",
    ),
    "gemma2-27b": (
        _decoder("gemma2", 256000, (4608, 36864, 46, 32, 16), 8192, head_dim=128, sliding_window=4096),
        "google/gemma-2-27b",
    ),
    "bloom-176b": (
        {"model_type": "bloom", "vocab_size": 250880, "hidden_size": 14336, "n_layer": 70, "n_head": 112},
        "bigscience/bloom",
    ),
    "gpt-neox-20b": (
        _decoder("gpt_neox", 50432, (6144, 24576, 44, 64, 64), 2048),
        "EleutherAI/gpt-neox-20b",
    ),
    "mamba2-2.7b": (
        {"model_type": "mamba2", "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64}
        | {"num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "tie_word_embeddings": True},
        "state-spaces/mamba2-2.7b",
    ),
    "nemotron-3-nano": (NANO, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "nemotron-3.5-lightning": (
        NANO | {"num_nextn_predict_layers": 1},
        "NVIDIA NeMo documentation: Nemotron 3 Nano with one extra prediction layer",
    ),
    "nemotron-3-super": (
        _nemotron(4096, SUPER_PATTERN, 32, 128, num_nextn_predict_layers=1)
        | {"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688}
        | {"moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024},
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    ),
    "nemotron-3-ultra": (
        _nemotron(8192, "MEMEMEME*" * 12, 64, 256, num_nextn_predict_layers=1)
        | {"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 5120}
        | {"moe_shared_expert_intermediate_size": 10240, "moe_latent_size": 2048},
        "arXiv:2606.15007: 108 layers, hidden size, experts; order, widths and heads are Super's in "
        "proportion, which gives the published 550 B parameters of which 55 B are active",
    ),
    "qwen2-vl-7b": (
        _qwen_vl("qwen2_vl", QWEN2_7B, embed_dim=1280, hidden_size=3584, mlp_ratio=4),
        "Qwen/Qwen2-VL-7B-Instruct",
    ),
    "qwen2-vl-72b": (
        _qwen_vl("qwen2_vl", QWEN2_72B, embed_dim=1280, hidden_size=8192, mlp_ratio=4),
        "Qwen/Qwen2-VL-72B-Instruct",
    ),
    "qwen2.5-vl-7b": (
        _qwen_vl("qwen2_5_vl", QWEN2_7B, hidden_size=1280, out_hidden_size=3584, intermediate_size=3420),
        "Qwen/Qwen2.5-VL-7B-Instruct",
    ),
    "qwen2.5-vl-72b": (
        _qwen_vl("qwen2_5_vl", QWEN2_72B, hidden_size=1280, out_hidden_size=8192, intermediate_size=3456),
        "Qwen/Qwen2.5-VL-72B-Instruct",
    ),
    "vit-l-16": (
        {"model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096, "patch_size": 16, "image_size": 224},
        "google/vit-large-patch16-224-in21k",
    ),
    "dit-xl-2": (
        {"_class_name": "DiTTransformer2DModel", "num_attention_heads": 16, "attention_head_dim": 72}
        | {"in_channels": 4, "out_channels": 8, "num_layers": 28, "patch_size": 2, "sample_size": 32},
        "facebook/DiT-XL-2-256; arXiv:2212.09748 table 1",
    ),
}
