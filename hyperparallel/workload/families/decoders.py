"""Dense decoders: Llama and its descendants, Gemma, GPT-2, GPT-NeoX, BLOOM, MPT.

Each function maps the keys of a published configuration to a `Model`; where a key may be left out, the
default is that of the family's own code. Families differ in biases, norms of queries and keys, windows and
ties, all of which change exact counts.
"""

from __future__ import annotations

from hyperparallel.errors import ModelError
from hyperparallel.workload.attention import Attention
from hyperparallel.workload.families.fields import Fields
from hyperparallel.workload.layer import Layer
from hyperparallel.workload.mlp import Mlp
from hyperparallel.workload.model import Model, runs

LAYER_WORDS = ("full_attention", "sliding_attention")


def head_dim(fields: Fields, heads: int) -> int:
    """The key head_dim, or hidden size over heads."""
    if fields.has("head_dim"):
        return fields.size("head_dim")
    return divided(fields, fields.size("hidden_size", "n_embd", "d_model"), heads)


def divided(fields: Fields, hidden: int, heads: int) -> int:
    """The size of each of `heads` heads; refuses a number that does not divide the hidden size."""
    if hidden % heads:
        allowed = f"a divisor of the hidden size {hidden}"
        raise ModelError(f"{fields.where}: number of attention heads", heads, allowed)
    return hidden // heads


def grouped(
    fields: Fields, *, bias: bool = False, out_bias: bool = False, qk_norm: bool = False, kv_heads: int = 0
) -> Attention:
    """Grouped-query attention from the usual keys; `kv_heads` is the family's default, 0 all heads."""
    heads = fields.size("num_attention_heads")
    groups = fields.size("num_key_value_heads", default=kv_heads or heads)
    if heads % groups:
        raise ModelError(f"{fields.where}: num_key_value_heads", groups, f"a divisor of {heads} heads")
    dim = head_dim(fields, heads)
    return Attention(heads, dim, groups, bias=bias, out_bias=out_bias, qk_norm="head" if qk_norm else "none")


def windowed(attention: Attention, window: int) -> Attention:
    """The same attention through a window; 0 leaves it whole."""
    kind = "window" if window else "gqa"
    return Attention(**{**vars(attention), "kind": kind, "window": window})


def decoder(fields: Fields, name: str, layers: list[Layer], *, tied: bool = False) -> Model:
    """A decoder with root-mean-square norms around layers that are given."""
    return Model(
        name,
        fields.size("hidden_size"),
        fields.size("vocab_size"),
        runs(layers),
        tied=fields.flag("tie_word_embeddings", tied),
        max_seq=fields.count("max_position_embeddings"),
        dropout=fields.fraction("attention_dropout"),
    )


def llama(fields: Fields, name: str) -> Model:
    """Llama 1 to 3, and what keeps its keys."""
    bias = fields.flag("attention_bias", False)
    attention = grouped(fields, bias=bias, out_bias=bias)
    mlp = Mlp(fields.size("intermediate_size"), bias=fields.flag("mlp_bias", False))
    return decoder(fields, name, [Layer(attention, mlp)] * depth(fields))


def mistral(fields: Fields, name: str) -> Model:
    """Mistral: every layer through the window where one is given."""
    attention = windowed(grouped(fields, kv_heads=8), fields.count("sliding_window"))
    mlp = Mlp(fields.size("intermediate_size"))
    return decoder(fields, name, [Layer(attention, mlp)] * depth(fields))


def qwen2(fields: Fields, name: str) -> Model:
    """Qwen2: biases on queries, keys and values."""
    return _qwen(fields, name, grouped(fields, bias=True))


def qwen3(fields: Fields, name: str) -> Model:
    """Qwen3: norms on queries and keys instead of biases."""
    bias = fields.flag("attention_bias", False)
    return _qwen(fields, name, grouped(fields, bias=bias, out_bias=bias, qk_norm=True))


def _qwen(fields: Fields, name: str, attention: Attention) -> Model:
    mlp = Mlp(fields.size("intermediate_size"))
    return decoder(fields, name, [Layer(one, mlp) for one in qwen_attention(fields, attention)])


def qwen_attention(fields: Fields, attention: Attention) -> list[Attention]:
    """The attention of each layer: a window from max_window_layers on, where windows are switched on."""
    number = depth(fields)
    window = fields.count("sliding_window") if fields.flag("use_sliding_window", False) else 0
    first = fields.count("max_window_layers", default=28)
    words = fields.words("layer_types", number, LAYER_WORDS)
    words = words or tuple("sliding_attention" if i >= first else "full_attention" for i in range(number))
    return [windowed(attention, window if word == "sliding_attention" else 0) for word in words]


def alternating(fields: Fields, attention: Attention, every: int) -> list[Attention]:
    """Attention through the window, except in each `every`-th layer, unless layer_types says otherwise."""
    number = depth(fields)
    words = fields.words("layer_types", number, LAYER_WORDS)
    words = words or tuple(
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(number)
    )
    window = fields.count("sliding_window")
    return [windowed(attention, window if word == "sliding_attention" else 0) for word in words]


def gemma(fields: Fields, name: str) -> Model:
    """Gemma 1: tied embedding, heads of a size of their own."""
    bias = fields.flag("attention_bias", False)
    layer = Layer(grouped(fields, bias=bias, out_bias=bias), Mlp(fields.size("intermediate_size")))
    return decoder(fields, name, [layer] * depth(fields), tied=True)


def gemma2(fields: Fields, name: str) -> Model:
    """Gemma 2: four norms a layer, every second layer through a window."""
    return _gemma(fields, name, every=2, qk_norm=False)


def gemma3(fields: Fields, name: str) -> Model:
    """Gemma 3 (text): norms on queries and keys, every sixth layer whole."""
    every = fields.size("sliding_window_pattern", default=6)
    return _gemma(fields, name, every=every, qk_norm=True)


def _gemma(fields: Fields, name: str, every: int, qk_norm: bool) -> Model:
    bias = fields.flag("attention_bias", False)
    attention = grouped(fields, bias=bias, out_bias=bias, qk_norm=qk_norm)
    mlp = Mlp(fields.size("intermediate_size"))
    layers = [Layer(one, mlp, norms=4) for one in alternating(fields, attention, every)]
    return decoder(fields, name, layers, tied=True)


def gpt2(fields: Fields, name: str) -> Model:
    """GPT-2: learned positions, biases everywhere, tied embedding."""
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    attention = Attention(heads, head_dim(fields, heads), bias=True, out_bias=True)
    mlp = Mlp(fields.size("n_inner", default=4 * hidden), gated=False, bias=True)
    positions = fields.size("n_positions", "max_position_embeddings")
    return Model(
        name,
        hidden,
        fields.size("vocab_size"),
        ((Layer(attention, mlp), fields.size("n_layer", "num_hidden_layers")),),
        tied=fields.flag("tie_word_embeddings", True),
        positions=positions,
        max_seq=positions,
        dropout=fields.fraction("resid_pdrop", 0.1),
        norm="layer",
    )


def gpt_neox(fields: Fields, name: str) -> Model:
    """GPT-NeoX and Pythia: attention and feed-forward part side by side."""
    heads = fields.size("num_attention_heads")
    bias = fields.flag("attention_bias", True)
    attention = Attention(heads, head_dim(fields, heads), bias=bias, out_bias=bias)
    mlp = Mlp(fields.size("intermediate_size"), gated=False, bias=True)
    layer = Layer(attention, mlp, parallel=fields.flag("use_parallel_residual", True))
    return Model(
        name,
        fields.size("hidden_size"),
        fields.size("vocab_size"),
        ((layer, depth(fields)),),
        tied=fields.flag("tie_word_embeddings", False),
        max_seq=fields.count("max_position_embeddings"),
        dropout=fields.fraction("hidden_dropout"),
        norm="layer",
    )


def bloom(fields: Fields, name: str) -> Model:
    """BLOOM: ALiBi instead of positions, a norm after the embedding."""
    hidden, heads = fields.size("hidden_size", "n_embed"), fields.size("n_head", "num_attention_heads")
    attention = Attention(heads, divided(fields, hidden, heads), bias=True, out_bias=True)
    layer = Layer(attention, Mlp(4 * hidden, gated=False, bias=True))
    return Model(
        name,
        hidden,
        fields.size("vocab_size"),
        ((layer, fields.size("n_layer", "num_hidden_layers")),),
        tied=fields.flag("tie_word_embeddings", True),
        max_seq=fields.count("seq_length", default=2048),
        norm="layer",
        embedding_norm=True,
    )


def mpt(fields: Fields, name: str) -> Model:
    """MPT as published: ALiBi, no biases, centred norms without bias, tied embedding."""
    hidden, heads = fields.size("d_model"), fields.size("n_heads")
    width = fields.size("expansion_ratio", default=4) * hidden
    layer = Layer(Attention(heads, head_dim(fields, heads)), Mlp(width, gated=False))
    return Model(
        name,
        hidden,
        fields.size("vocab_size"),
        ((layer, fields.size("n_layers")),),
        tied=fields.flag("tie_word_embeddings", True),
        max_seq=fields.count("max_seq_len"),
        norm="layer_no_bias",
    )


def depth(fields: Fields) -> int:
    """The number of layers."""
    return fields.size("num_hidden_layers")
