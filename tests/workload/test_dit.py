"""A diffusion transformer written out after its paper costs what its `Model` says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hyperparallel.workload.hf_config import model_from_config
from hyperparallel.workload.presets import model_preset
from tests.workload.configs import DIT

pytestmark = pytest.mark.fake

HIDDEN, HEADS, TOKENS = 32, 4, 16


class Block(nn.Module):
    """arXiv:2212.09748 figure 3: attention and feed-forward part, modulated by the condition c_H."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(HIDDEN, 6 * HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x_SH: Tensor, c_H: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(functional.silu(c_H)).chunk(6)
        q_DSE, k_DSE, v_DSE = (
            part.view(TOKENS, HEADS, -1).transpose(0, 1)
            for part in self.qkv(functional.layer_norm(x_SH, (HIDDEN,)) * scale + shift).chunk(3, -1)
        )
        mixed_DSE = torch.softmax(q_DSE @ k_DSE.mT, -1) @ v_DSE
        x_SH = x_SH + gate * self.proj(mixed_DSE.transpose(0, 1).reshape(TOKENS, HIDDEN))
        wide = functional.gelu(self.up(functional.layer_norm(x_SH, (HIDDEN,)) * scale2 + shift2))
        return x_SH + gate2 * self.down(wide)


class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, HIDDEN, kernel_size=2, stride=2)
        self.time = nn.Sequential(nn.Linear(256, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.label = nn.Embedding(11, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.modulation = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out = nn.Linear(HIDDEN, 2 * 2 * 8)

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> Tensor:
        x_SH = self.patch(image)[0].flatten(1).T
        c_H = self.time(time) + self.label(label)
        for block in self.blocks:
            x_SH = block(x_SH, c_H)
        shift, scale = self.modulation(functional.silu(c_H)).chunk(2)
        out: Tensor = self.out(functional.layer_norm(x_SH, (HIDDEN,)) * scale + shift)
        return out


def test_parameters_and_flops() -> None:
    module, model = Dit(), model_from_config(DIT, "dit")
    assert model.params() == sum(weight.numel() for weight in module.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.rand(1, 4, 8, 8), torch.rand(256), torch.tensor(3))
    assert model.max_seq == TOKENS
    assert TOKENS * model.flops_per_token(TOKENS) == counter.get_total_flops()


def test_modulation_is_a_part_of_its_own() -> None:
    model = model_from_config(DIT, "dit")
    split = model.layer_params(model.layer_at(0))
    assert split.modulation == 6 * HIDDEN * HIDDEN + 6 * HIDDEN
    assert split.norms == 0


def test_dit_xl_2_as_published() -> None:
    """Table 1: 675 M parameters, 118.6 GFLOPs for an image of 256 pixels, a multiply-add counted as one."""
    model = model_preset("dit-xl-2")
    assert model.params() / 1e6 == pytest.approx(675, abs=0.5)
    assert model.max_seq * model.flops_per_token(model.max_seq) / 2e9 == pytest.approx(118.6, rel=0.01)
