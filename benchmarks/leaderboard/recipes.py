"""What Megatron-Bridge's recipes switch on that its tables of results do not say.

Read from the public recipes of each release (scripts/performance/configs of tags v0.2.0 to v0.5.1,
src/megatron/bridge/perf_recipes of v0.6.0; 25.11 is v0.2.0, 26.02 v0.3.0, 26.04 v0.4.0, 26.06 v0.5.0, 26.08
v0.6.0):

    cuda_graph_impl          full_iteration: everything is recorded; transformer_engine with the scope attn,
                             (mamba,) moe_router, moe_preprocess: everything but the experts; else nothing
    cutedsl_fused_grouped_mlp   the experts' two products, activation and conversion are one kernel
    fp8_dot_product_attention   attention in 8 bits
    moe_a2a_overlap          tokens travel beside another microbatch's compute

A release before the first that is published follows that one. Left out: recomputation of small modules,
offloaded activations, token dropping, which dispatcher moves tokens.
"""

from __future__ import annotations

from typing import Any

RECORDED = {
    "llama3.1-8b": ("b200", "gb200", "gb300", "b300", "h100"),
    "deepseek-v3": ("gb200",),
    "gpt-oss-120b": ("gb300", "b300"),
    "qwen3-235b-a22b": ("gb200", "gb300"),
    "qwen3-30b-a3b": ("b200", "b300", "gb200", "gb300"),
    "nemotron-3-nano": ("b200", "b300", "gb200", "gb300", "h100"),
    "nemotron-3.5-lightning": ("b200", "b300", "gb200", "gb300"),
    "nemotron-3-super": ("b200", "b300", "gb200", "gb300"),
}
"""Systems on which layers are recorded, experts apart, in every release."""

FUSED = {
    "deepseek-v3": {"gb200": "26.06", "gb300": "26.06", "b300": "26.06.01"},
    "gpt-oss-120b": {"gb200": "26.06", "gb300": "26.06"},
    "qwen3-235b-a22b": {"gb200": "26.06", "gb300": "26.06", "b200": "26.06.01", "b300": "26.06.01"},
    "qwen3-30b-a3b": {"gb200": "26.06", "gb300": "26.06", "b300": "26.06", "b200": "26.06.01"},
    "nemotron-3-ultra": {"gb200": "26.08", "gb300": "26.08"},
}
"""First release whose mxfp8 recipe records the whole step, fuses experts and overlaps their messages."""


def switches(model: str, system: str, dtype: str, release: str, virtual: int) -> dict[str, Any]:
    """Fields of the strategy. model: our preset's name. system: such as "gb200". release: such as "26.04.01".

    >>> switches("qwen3-30b-a3b", "gb300", "mxfp8", "26.06.01", 1)["experts"]
    'fused'
    """
    fused = dtype == "mxfp8" and release >= FUSED.get(model, {}).get(system, "99")
    return {
        "graph": fused or _recorded(model, system, dtype, release),
        "experts": "fused" if fused else "loop",
        "dispatcher": "once" if fused or _once(model, system, release) else "exchange",
        "attention": "vendor-8bit" if fused and _low_attention(model, system) else "vendor",
        "overlap_experts": (fused and model != "nemotron-3-ultra")
        or _overlapped(model, system, release, virtual),
        "parts": _again(model, system, dtype, release, fused),
    }


def _again(model: str, system: str, dtype: str, release: str, fused: bool) -> tuple[str, ...]:
    """recompute_modules: layernorm, moe_act, mla_up_proj, moe (mlp, of 3 dense layers in 61: left out)."""
    if model == "gpt-oss-120b":
        return () if fused or system in ("gb300", "b300") else ("norms", "activations")
    if model == "deepseek-v3":
        if system == "gb300" and (fused or dtype == "bf16" or release < "26.02"):
            return () if fused else ("activations",)
        return () if system == "gb200" and dtype != "bf16" and "26.04" <= release < "26.06" else ("latent",)
    if model == "nemotron-3-nano" and system == "h100":
        return ("norms", "experts")
    if model == "nemotron-3-super":
        kept = ("b300", "mxfp8"), ("b200", "nvfp4")
        return ("norms", "activations") if system in ("b200", "b300") and (system, dtype) not in kept else ()
    return {"kimi-k2": ("latent",), "nemotron-3-ultra": ("activations",)}.get(model, ())


def _low_attention(model: str, system: str) -> bool:
    """DeepSeek-V3's recipe leaves it out on GB200, Nemotron Ultra's everywhere."""
    return model != "nemotron-3-ultra" and (model, system) != ("deepseek-v3", "gb200")


def _once(model: str, system: str, release: str) -> bool:
    """moe_flex_dispatcher_backend is deepep or hybridep."""
    if model == "gpt-oss-120b":
        since = {"b300": "26.02.01", "b200": "26.04", "gb200": "26.04"}
        return release >= since.get(system, "99")
    if model == "deepseek-v3":
        return system in ("h100", "gb200", "gb300") or release >= "26.02"
    if model == "qwen3-235b-a22b":
        return system in ("gb200", "gb300")
    return not (model == "qwen3-30b-a3b" and release < "25.11")


def _recorded(model: str, system: str, dtype: str, release: str) -> bool:
    if model == "deepseek-v3" and system == "gb300":
        return dtype == "bf16"
    if model == "deepseek-v3" and system in ("b200", "b300"):
        return release >= "26.04.01"
    if model == "nemotron-3-super" and system == "b200":
        return dtype == "nvfp4"
    return system in RECORDED.get(model, ())


def _overlapped(model: str, system: str, release: str, virtual: int) -> bool:
    if model == "qwen3-235b-a22b" and system in ("h100", "b200", "b300"):
        return virtual > 1
    if model == "qwen3-30b-a3b" and system == "h100":
        return virtual > 1
    if model == "deepseek-v3":
        return (system == "h100" and release < "26.02") or (system == "b200" and virtual > 1)
    return model == "gpt-oss-120b" and system == "gb200" and release >= "26.04"
