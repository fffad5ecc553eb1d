"""A program is captured for the device that it will run on, wherever the module and its batch are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hyperparallel.graph.capture.capture import Captured, capture

pytestmark = pytest.mark.fake


class Shifted(nn.Module):
    """Makes a tensor of its own on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + torch.arange(4.0, device=x.device)


def devices(captured: Captured) -> set[str]:
    """Of all values, and of all arguments of ops."""
    nodes = list(captured.graph.nodes)
    found = {n.meta["val"].device.type for n in nodes if isinstance(n.meta.get("val"), Tensor)}
    return found | {n.kwargs["device"].type for n in nodes if "device" in n.kwargs}


def test_all_is_captured_on_the_device_that_is_asked_for() -> None:
    """With the backward on meta; a torch without CUDA differentiates no tensor that says it is there."""
    x = torch.zeros(3, 4)
    assert devices(capture(Shifted(), (x,))) == {"cpu"}
    assert devices(capture(Shifted(), (x,), device=torch.device("meta"))) == {"meta"}
    found = capture(Shifted().requires_grad_(False), (x,), train=False, device=torch.device("cuda", 0))
    assert devices(found) == {"cuda"}
    assert all(p.device.type == "cpu" for p in Shifted().parameters())
