"""State-space models and hybrids: Mamba, Mamba-2, Nemotron-H and Nemotron 3, Qwen3-Next.

A Nemotron-H layer holds one part only (a mixer, attention, a dense layer or a mixture) behind one norm; the
order stands in a pattern of letters or in a list of words.
"""

from __future__ import annotations

from dataclasses import replace

from hyperparallel.errors import ModelError, nearest
from hyperparallel.workload.families.decoders import decoder, depth, grouped
from hyperparallel.workload.families.experts import mixture, sparse_layers
from hyperparallel.workload.families.fields import Fields
from hyperparallel.workload.layer import Layer
from hyperparallel.workload.mlp import Mlp
from hyperparallel.workload.model import Model
from hyperparallel.workload.recurrent import StateSpace

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_WORDS = {"mamba": "linear_attention", "attention": "full_attention"}


def mamba(fields: Fields, name: str) -> Model:
    """Mamba: one mixer a layer, no feed-forward part."""
    hidden, rank = fields.size("hidden_size"), fields.values.get("time_step_rank", "auto")
    mixer = StateSpace(
        "mamba",
        heads=fields.size("expand", default=2) * hidden,
        head_dim=1,
        state=fields.size("state_size"),
        conv=fields.size("conv_kernel", default=4),
        dt_rank=-(-hidden // 16) if rank in ("auto", None) else fields.size("time_step_rank"),
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
    )
    return _stack(fields, name, mixer, tied=True)


def mamba2(fields: Fields, name: str) -> Model:
    """Mamba-2: heads that share a state matrix by groups."""
    mixer = StateSpace(
        "mamba2",
        heads=fields.size("num_heads"),
        head_dim=fields.size("head_dim"),
        state=fields.size("state_size"),
        groups=fields.size("n_groups"),
        conv=fields.size("conv_kernel", default=4),
        chunk=fields.size("chunk_size", default=256),
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
    )
    return _stack(fields, name, mixer, tied=False)


def _stack(fields: Fields, name: str, mixer: StateSpace, tied: bool) -> Model:
    hidden, vocab = fields.size("hidden_size"), fields.size("vocab_size")
    layers = ((Layer(mixer, norms=1), depth(fields)),)
    return Model(name, hidden, vocab, layers, tied=fields.flag("tie_word_embeddings", tied))


def nemotron_h(fields: Fields, name: str) -> Model:
    """Nemotron-H: a pattern of Mamba-2, attention, dense and expert layers."""
    mixer = StateSpace(
        "mamba2",
        heads=fields.size("mamba_num_heads"),
        head_dim=fields.size("mamba_head_dim"),
        state=fields.size("ssm_state_size", "mamba_d_state"),
        groups=fields.size("n_groups", "mamba_n_groups", default=8),
        conv=fields.size("conv_kernel", "mamba_d_conv", default=4),
        chunk=fields.size("chunk_size", "mamba_chunk_size", default=128),
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
    )
    words = _words(fields)
    kinds = {"linear_attention": Layer(mixer, norms=1)}
    if "full_attention" in words:
        kinds["full_attention"] = Layer(grouped(fields, kv_heads=8), norms=1)
    bias = fields.flag("mlp_bias", False)
    if "mlp" in words:
        kinds["mlp"] = Layer(mlp=Mlp(fields.size("intermediate_size"), gated=False, bias=bias), norms=1)
    if "moe" in words:
        moe = mixture(fields, width="moe_intermediate_size", experts=("n_routed_experts",))
        shared = fields.size("moe_shared_expert_intermediate_size")
        latent = fields.count("moe_latent_size")
        moe = replace(moe, shared_width=shared, gated=False, shared_bias=bias, latent=latent)
        kinds["moe"] = Layer(mlp=moe, norms=1)
    model = decoder(fields, name, [kinds[word] for word in words])
    mtp = fields.count("num_nextn_predict_layers")
    both = all(word in kinds for word in ("full_attention", "moe"))
    block = (kinds["full_attention"], kinds["moe"]) if mtp and both else ()
    return replace(model, mtp=mtp, mtp_block=block)


def _words(fields: Fields) -> list[str]:
    pattern = fields.values.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        for letter in pattern:
            if letter not in PATTERN:
                raise ModelError(
                    f"{fields.where}: hybrid_override_pattern",
                    letter,
                    "M (Mamba-2), * (attention), - (dense), E (experts)",
                )
        return [PATTERN[letter] for letter in pattern]
    found = fields.values.get("layers_block_type") or fields.values.get("layer_types")
    if not isinstance(found, list):
        names = ("hybrid_override_pattern", "layers_block_type")
        raise fields.missing(names, "which part each layer holds")
    known = tuple(PATTERN.values())
    words = [OLD_WORDS.get(str(word), str(word)) for word in found]
    for word in words:
        if word not in known:
            instead = nearest(word, known, 1)
            field = f"{fields.where}: layers_block_type"
            raise ModelError(field, word, f"one of {', '.join(known)}", instead)
    return words


def qwen3_next(fields: Fields, name: str) -> Model:
    """Qwen3-Next: three layers of gated delta rule for one of gated attention, a mixture in each."""
    delta = StateSpace(
        "delta",
        heads=fields.size("linear_num_value_heads"),
        head_dim=fields.size("linear_value_head_dim"),
        state=fields.size("linear_key_head_dim"),
        groups=fields.size("linear_num_key_heads"),
        conv=fields.size("linear_conv_kernel_dim", default=4),
        chunk=64,
        conv_bias=False,
    )
    bias = fields.flag("attention_bias", False)
    attention = replace(grouped(fields, bias=bias, out_bias=bias, qk_norm=True, kv_heads=2), gated=True)
    number, every = depth(fields), fields.size("full_attention_interval", default=4)
    words = fields.words("layer_types", number, ("linear_attention", "full_attention"))
    words = words or tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(number))
    moe = mixture(fields, width="moe_intermediate_size", experts=("num_experts", "num_local_experts"))
    moe = replace(moe, shared_width=fields.size("shared_expert_intermediate_size"), shared_gate=True)
    layers = [
        Layer(delta if word == "linear_attention" else attention, part)
        for word, part in zip(words, sparse_layers(fields, moe), strict=True)
    ]
    return decoder(fields, name, layers)
