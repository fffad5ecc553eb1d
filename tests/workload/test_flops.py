"""FLOPs of a token equal what torch counts in the libraries' own modules; masks count what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, ViTModel

from hyperparallel.workload.attention import Attention
from hyperparallel.workload.families.fields import Fields
from hyperparallel.workload.families.vision import qwen2_5_vl, qwen2_vl
from hyperparallel.workload.hf_config import model_from_config
from hyperparallel.workload.model import Layer, Mlp, Model
from hyperparallel.workload.recurrent import StateSpace
from tests.workload.configs import CONFIGS

pytestmark = pytest.mark.fake

SEQ = 12
RECURRENT = ("mamba", "mamba2", "nemotron_h", "qwen3_next")
DECODERS = [n for n in CONFIGS if not n.startswith((*RECURRENT, "vit", "qwen2_vl", "qwen2_5_vl", "llava"))]


def counted(module: nn.Module, **inputs: Any) -> int:
    """FLOPs of one forward pass as torch counts them: every matrix product and convolution, whole squares."""
    module.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**inputs)
    return counter.get_total_flops()


def module(name: str, auto: Any = AutoModelForCausalLM) -> nn.Module:
    keys = dict(CONFIGS[name])
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(0)
    made: nn.Module = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
    return made


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_costs_what_its_module_computes(name: str) -> None:
    tokens = torch.randint(0, 100, (1, SEQ))
    made = module(name)
    with torch.no_grad():
        for path, weight in made.named_parameters():
            # Routers start as zeros or from empty memory: ties would send all tokens to one expert.
            if weight.dim() == 1 and "norm" in path:
                weight.fill_(1.0)
            else:
                weight.normal_(0, 0.1)
    ours = SEQ * model_from_config(CONFIGS[name], name).flops_per_token(SEQ, causal=False)
    assert counted(made, input_ids=tokens, use_cache=False) == ours


@pytest.mark.parametrize(
    ("window", "causal"), [(0, True), (0, False), (4, True), (1, True), (30, True), (12, True)]
)
def test_keys_count_the_mask(window: int, causal: bool) -> None:
    i, j = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None]
    mask = (j <= i) if causal else torch.ones(SEQ, SEQ, dtype=torch.bool)
    if window:
        mask &= j > i - window
    attention = Attention(2, 8, kind="window" if window else "gqa", window=window, causal=causal)
    assert attention.keys(SEQ) == pytest.approx(mask.sum().item() / SEQ)
    assert attention.keys(SEQ, causal=False) == SEQ


def test_causal_counting_halves_only_the_core() -> None:
    model = model_from_config(CONFIGS["llama"], "llama")
    attention = model.layer_at(0).attention
    assert attention is not None
    whole, left = model.flops_per_token(SEQ, causal=False), model.flops_per_token(SEQ, causal=True)
    core = model.num_layers * attention.core_flops(SEQ, causal=False)
    assert whole - left == pytest.approx(core * (1 - (SEQ + 1) / (2 * SEQ)))


def test_the_pixels_of_vit() -> None:
    model = model_from_config(CONFIGS["vit"], "vit")
    keys = {k: v for k, v in CONFIGS["vit"].items() if k != "model_type"}
    made = ViTModel._from_config(AutoConfig.for_model("vit", **keys), attn_implementation="eager")
    seen = counted(made, pixel_values=torch.rand(1, 3, 16, 16))
    patch = model.stem[0]
    # The class token comes from no patch: one product fewer than tokens.
    assert seen == model.max_seq * model.flops_per_token(model.max_seq) - patch.flops(1)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_encoder_of_a_vision_language_model(name: str) -> None:
    """Windows are off here: torch counts each window's square, which a window of all patches equals."""
    keys = {**CONFIGS[name], "vision_config": {**CONFIGS[name]["vision_config"]}}
    if name == "qwen2_5_vl":
        keys["vision_config"]["fullatt_block_indexes"] = [0, 1]
    read = qwen2_vl if name == "qwen2_vl" else qwen2_5_vl
    part = read(Fields(keys, "config"), name, image_size=24).encoders[0]
    assert (part.tokens, part.tokens_out) == (36, 9)
    config = AutoConfig.for_model(name, **{k: v for k, v in keys.items() if k != "model_type"})
    made = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").model.visual
    pixels = torch.rand(36, 3 * 2 * 4 * 4)
    seen = counted(made, hidden_states=pixels, grid_thw=torch.tensor([[1, 6, 6]]))
    assert seen == part.flops()


def test_the_encoder_of_llava() -> None:
    keys = CONFIGS["llava"]
    part = model_from_config(keys, "llava").encoders[0]
    config = AutoConfig.for_model("llava", **{k: v for k, v in keys.items() if k != "model_type"})
    made = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").model
    seen = counted(made.vision_tower, pixel_values=torch.rand(1, 3, 16, 16))
    seen += counted(made.multi_modal_projector, image_features=torch.rand(1, 16, 32))
    (patch,), token = part.model.stem, 1  # the class token has no patch and isn't projected
    assert seen == part.flops() - token * (patch.flops(1) + sum(one.flops(1) for one in part.projector))


def _chunks(mixer: StateSpace, chunk: int) -> int:
    """The products of one chunk of Mamba-2 (arXiv:2405.21060 listing 1), as einsum sees them."""
    heads, dim, state, groups = mixer.heads, mixer.head_dim, mixer.state, mixer.groups
    c_GLN, b_GLN = torch.rand(groups, chunk, state), torch.rand(groups, chunk, state)
    x_HLP, wide_HLN = torch.rand(heads, chunk, dim), torch.rand(heads, chunk, state)
    with FlopCounterMode(display=False) as counter:
        torch.bmm(c_GLN, b_GLN.mT)
        scores_HLL = torch.rand(heads, chunk, chunk)
        torch.bmm(scores_HLL, x_HLP)
        state_HNP: Tensor = torch.bmm(wide_HLN.mT, x_HLP)
        torch.bmm(wide_HLN, state_HNP)
    return counter.get_total_flops()


def test_a_chunk_of_mamba2() -> None:
    chunk = 8
    mixer = StateSpace("mamba2", heads=6, head_dim=4, state=10, groups=2, chunk=chunk)
    conv = 2 * mixer.conv_channels * mixer.conv
    ours = mixer.core_flops(1024) - conv
    inside = 2 * (mixer.groups * mixer.state + mixer.inner)
    whole = ours + inside * (chunk - (chunk + 1) / 2)  # torch counts the square, we the triangle
    assert chunk * whole == _chunks(mixer, chunk)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "nemotron_h", "nemotron_h latent", "qwen3_next"])
def test_the_matrices_of_recurrent_models(name: str) -> None:
    """Scans are written in many ways; the weights' products are the same in all."""
    model = model_from_config(CONFIGS[name], name)
    cores = 0.0
    for layer in model.each_layer():
        if isinstance(layer.attention, StateSpace):
            cores += layer.attention.core_flops(SEQ)
    ours = SEQ * (model.flops_per_token(SEQ, causal=False) - cores)
    made = module(name)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made.eval()(torch.randint(0, 100, (1, SEQ)), use_cache=False)
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in _PRODUCTS)
    attention = sum(
        SEQ * layer.attention.core_flops(SEQ, causal=False)
        for layer in model.each_layer()
        if isinstance(layer.attention, Attention)
    )
    assert products == ours - attention


_PRODUCTS = {"aten.mm", "aten.addmm"}


def test_cross_attention_makes_keys_once_for_each_context_vector() -> None:
    hidden, context, source = 16, 5, 24
    cross = Attention(2, 8, causal=False, source_dim=source, context=context)
    model = Model("cross", hidden, 0, ((Layer(cross=cross, mlp=Mlp(32), norms=3), 1),))
    x_SH, c_CD = torch.rand(SEQ, hidden), torch.rand(context, source)
    with FlopCounterMode(display=False) as counter:
        q_SH = nn.Linear(hidden, 16)(x_SH)
        k_CH, v_CH = nn.Linear(source, 16)(c_CD), nn.Linear(source, 16)(c_CD)
        for head in (slice(0, 8), slice(8, 16)):
            (q_SH[:, head] @ k_CH[:, head].T) @ v_CH[:, head]
        nn.Linear(16, hidden)(q_SH)
        nn.Linear(32, hidden)(nn.Linear(hidden, 32)(x_SH) * nn.Linear(hidden, 32)(x_SH))
    assert SEQ * model.flops_per_token(SEQ) == pytest.approx(counter.get_total_flops())
