"""What ranks compare before they run tells programs apart that compute differently, and only those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperparallel.graph.build import build
from hyperparallel.graph.capture.capture import capture
from hyperparallel.graph.capture.extract import extract
from hyperparallel.graph.decided import Decision, decisions
from hyperparallel.graph.joint import constants
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.job.agreement import first_difference

pytestmark = pytest.mark.fake
PLAN = Plan(Layout((2,), ("dp",)))


class Scaled(nn.Module):
    """The same ops, nodes and layouts whatever its width and its number are."""

    def __init__(self, scale: float = 0.5, width: int = 8, negative: float = 0.1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)
        self.scale, self.act = scale, nn.LeakyReLU(negative)

    def forward(self, x: Tensor) -> Tensor:
        return (self.act(self.down(self.up(x))) * self.scale).sum()


def decided(**how: Any) -> list[Decision]:
    built = build(Scaled(**how), PLAN, (torch.zeros(4, 4),), loss="")
    return decisions(built, built.rank_program(0), {})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"scale": 0.25}, ("aten.mul.Tensor(leaky_relu, 0.5)", "aten.mul.Tensor(leaky_relu, 0.25)")),
        ({"negative": 0.2}, ("aten.leaky_relu.default(addmm_1, 0.1)", "leaky_relu.default(addmm_1, 0.2)")),
        ({"width": 16}, ("parameter up.weight: float32 of shape [8, 4]", "float32 of shape [16, 4]")),
    ],
)
def test_models_that_differ_in_one_number_are_told_apart(how: dict[str, Any], words: tuple[str, str]) -> None:
    mine, other = decided(), decided(**how)
    assert [about for about, _ in mine] == [about for about, _ in other]
    said = first_difference((0, 1), [mine, other])
    assert all(each in said for each in words), said


def test_equal_models_decide_alike() -> None:
    assert decided() == decided()


class OnItsDevice(nn.Module):
    """Makes a tensor on the device of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(4.0, device=x.device)


def test_the_number_of_a_rank_s_device_is_no_difference() -> None:
    work = [
        extract(capture(OnItsDevice(), (torch.zeros(3, 4),), train=False, device=torch.device("cuda", i)))
        for i in range(2)
    ]
    assert work[0] == work[1] and any("cuda" in op.kwargs.values() for op in work[0].ops)
    kept: Any = [
        SimpleNamespace(shape=(2,), dtype=torch.float32, device=torch.device("cuda", i), is_meta=True)
        for i in range(2)
    ]
    assert constants._digest(kept[0]) == constants._digest(kept[1])
