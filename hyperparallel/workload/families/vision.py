"""Networks on images: ViT, Qwen2-VL, Qwen2.5-VL and LLaVA (an encoder before a decoder), diffusion
transformers.

A patch of an image is a token; the product with the patch is the `stem`. A vision-language model is its
decoder with a `EncoderPart` in front, whose tokens depend on the size of the image. Sources: ViT
arXiv:2010.11929, LLaVA arXiv:2304.08485, Qwen2-VL arXiv:2409.12191, Qwen2.5-VL arXiv:2502.13923, DiT
arXiv:2212.09748.

Left out: the convolutional encoder of latent diffusion, which is not trained with the transformer. A DiT
is counted with one embedding of time and class for all layers, as in its own code; the file layout of
Diffusers stores a copy of it in each layer.
"""

from __future__ import annotations

from dataclasses import replace

from hyperparallel.errors import ModelError, nearest
from hyperparallel.workload.attention import Attention
from hyperparallel.workload.families.decoders import divided, llama, mistral, qwen2
from hyperparallel.workload.families.fields import Fields
from hyperparallel.workload.layer import Layer, Norm
from hyperparallel.workload.linear import Linear
from hyperparallel.workload.mlp import Mlp
from hyperparallel.workload.model import EncoderPart, Model, runs

IMAGE_SIZE = 448
"""Pixels a side of the image that a vision-language model is counted for, unless told otherwise."""

TIME_FREQUENCIES = 256
"""Sines and cosines that a DiT's time step is expanded into (arXiv:2212.09748, its published code)."""


def vit(fields: Fields, name: str) -> Model:
    """ViT, with its classifier if the file says so, else with its pooler."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    patch = fields.size("patch_size", default=16)
    tokens = (fields.size("image_size", default=224) // patch) ** 2 + 1
    attention = Attention(
        heads, divided(fields, hidden, heads), causal=False, bias=fields.flag("qkv_bias", True), out_bias=True
    )
    layer = Layer(attention, Mlp(fields.size("intermediate_size"), gated=False, bias=True))
    return Model(
        name,
        hidden,
        vocab=0,
        layers=((layer, fields.size("num_hidden_layers")),),
        positions=tokens,
        max_seq=tokens,
        dropout=fields.fraction("hidden_dropout_prob"),
        norm="layer",
        stem=(Linear("patch", fields.size("num_channels", default=3) * patch**2, hidden, bias=True),),
        outputs=(_vit_output(fields, hidden),),
        vectors=1,
    )


def _vit_output(fields: Fields, hidden: int) -> Linear:
    if "ForImageClassification" in str(fields.values.get("architectures")):
        labels = len(fields.values.get("id2label") or ()) or fields.size("num_labels", default=2)
        return Linear("classifier", hidden, labels, bias=True, per_sample=True)
    width = fields.size("pooler_output_size", default=hidden)
    return Linear("pooler", hidden, width, bias=True, per_sample=True)


def qwen2_vl(fields: Fields, name: str, image_size: int = IMAGE_SIZE) -> Model:
    """Qwen2-VL: plain layers over all patches of an image."""
    vision = fields.section("vision_config")
    hidden, heads = vision.size("embed_dim"), vision.size("num_heads")
    mlp = Mlp(vision.size("mlp_ratio", default=4) * hidden, gated=False, bias=True)
    attention = Attention(heads, divided(vision, hidden, heads), causal=False, bias=True, out_bias=True)
    layers = [Layer(attention, mlp)] * vision.size("depth")
    return _with_vision(fields, name, layers, hidden, vision.size("hidden_size"), "layer", image_size)


def qwen2_5_vl(fields: Fields, name: str, image_size: int = IMAGE_SIZE) -> Model:
    """Qwen2.5-VL: most layers attend inside windows of the image."""
    vision = fields.section("vision_config")
    hidden, heads, number = vision.size("hidden_size"), vision.size("num_heads"), vision.size("depth")
    whole = Attention(heads, divided(vision, hidden, heads), causal=False, bias=True, out_bias=True)
    side = vision.size("window_size", default=112) // vision.size("patch_size", default=14)
    inside = replace(whole, kind="window", window=side**2)
    full = vision.sizes("fullatt_block_indexes") or (7, 15, 23, 31)
    mlp = Mlp(vision.size("intermediate_size"), bias=True)
    layers = [Layer(whole if index in full else inside, mlp) for index in range(number)]
    return _with_vision(fields, name, layers, hidden, vision.size("out_hidden_size"), "rms", image_size)


def _with_vision(
    fields: Fields, name: str, layers: list[Layer], hidden: int, out: int, norm: Norm, image_size: int
) -> Model:
    vision = fields.section("vision_config")
    nested = fields.has("text_config")
    decoder = qwen2(fields.section("text_config") if nested else fields, name)
    if nested and fields.has("tie_word_embeddings"):
        decoder = replace(decoder, tied=fields.flag("tie_word_embeddings", False))
    if out != decoder.hidden:
        allowed = f"the hidden size {decoder.hidden} of the decoder"
        raise ModelError(f"{vision.where}: size of the encoder's result", out, allowed)
    patch, merge = vision.size("patch_size", default=14), vision.size("spatial_merge_size", default=2)
    side = image_size // (patch * merge) * merge
    inputs = vision.size("in_channels", "in_chans", default=3) * patch**2
    inputs *= vision.size("temporal_patch_size", default=2)
    merged = hidden * merge**2
    encoder = Model(
        f"{name} vision",
        hidden,
        vocab=0,
        layers=runs(layers),
        norm=norm,
        final_norms=0,
        stem=(Linear("patch", inputs, hidden),),
        max_seq=side**2,
    )
    projector = (
        Linear("merge_up", merged, merged, bias=True, cut="out"),
        Linear("merge_down", merged, out, bias=True, cut="in"),
    )
    norm_params = hidden * (2 if norm == "layer" else 1)
    part = EncoderPart(encoder, side**2, merge**2, projector, norm_params)
    return replace(decoder, encoders=(part,))


LLAVA_DECODERS = {"llama": llama, "mistral": mistral, "qwen2": qwen2}


def llava(fields: Fields, name: str) -> Model:
    """LLaVA: CLIP's vision transformer, two matrices, a decoder. The last layer of CLIP, whose result LLaVA
    does not read, is counted as if it ran; the class token as if it went through the projector."""
    vision, text = fields.section("vision_config"), fields.section("text_config")
    kind = str(text.values.get("model_type", "llama"))
    if kind not in LLAVA_DECODERS:
        hint = nearest(kind, LLAVA_DECODERS, 1)
        raise ModelError(f"{text.where}: model_type", kind, ", ".join(LLAVA_DECODERS), hint)
    decoder = LLAVA_DECODERS[kind](text, name)
    if fields.has("tie_word_embeddings"):
        decoder = replace(decoder, tied=fields.flag("tie_word_embeddings", False))
    hidden, heads = vision.size("hidden_size"), vision.size("num_attention_heads")
    patch = vision.size("patch_size")
    tokens = (vision.size("image_size") // patch) ** 2 + 1
    head = divided(vision, hidden, heads)
    attention = Attention(heads, head, causal=False, bias=True, out_bias=True)
    layer = Layer(attention, Mlp(vision.size("intermediate_size"), gated=False, bias=True))
    encoder = Model(
        f"{name} vision",
        hidden,
        vocab=0,
        layers=((layer, vision.size("num_hidden_layers")),),
        positions=tokens,
        max_seq=tokens,
        norm="layer",
        embedding_norm=True,
        stem=(Linear("patch", vision.size("num_channels", default=3) * patch**2, hidden),),
        vectors=1,
    )
    bias = fields.flag("multimodal_projector_bias", True)
    projector = (
        Linear("project_up", hidden, decoder.hidden, bias, cut="out"),
        Linear("project_down", decoder.hidden, decoder.hidden, bias, cut="in"),
    )
    return replace(decoder, encoders=(EncoderPart(encoder, tokens, 1, projector),))


def dit(fields: Fields, name: str) -> Model:
    """A diffusion transformer with adaLN-Zero, from the keys of Diffusers."""
    heads, size = fields.size("num_attention_heads"), fields.size("attention_head_dim")
    channels, patch = fields.size("in_channels"), fields.size("patch_size", default=2)
    bias = fields.flag("attention_bias", True)
    attention = Attention(heads, size, causal=False, bias=bias, out_bias=True)
    hidden = heads * size
    layer = Layer(attention, Mlp(4 * hidden, gated=False, bias=True), adaln=6)
    tokens = (fields.size("sample_size", default=32) // patch) ** 2
    out = patch**2 * fields.size("out_channels", default=channels)
    return Model(
        name,
        hidden,
        vocab=0,
        layers=((layer, fields.size("num_layers")),),
        max_seq=tokens,
        norm="bare",
        stem=(
            Linear("patch", channels * patch**2, hidden, bias=True),
            Linear("time_up", TIME_FREQUENCIES, hidden, bias=True, per_sample=True),
            Linear("time_down", hidden, hidden, bias=True, per_sample=True),
        ),
        outputs=(
            Linear("final_modulation", hidden, 2 * hidden, bias=True, per_sample=True),
            Linear("unpatch", hidden, out, bias=True),
        ),
        vectors=fields.count("num_embeds_ada_norm", default=1000) + 1,
    )
