"""Clipping: the norm of all ranks' gradients, and the update after it, equal one device's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.step import TrainStep
from tests.runtime.module import small
from tests.runtime.module.dense import DP2, TP2, X, on_ranks
from tests.runtime.module.small import made, numbers
from tests.runtime.module.test_step import sgd

pytestmark = pytest.mark.procs


def test_clipping_and_updates_equal_one_device() -> None:
    """The norm counts pieces once and copies once; gradients that share memory are scaled once."""

    def check() -> None:
        for cls in (small.Rows, small.Shared, small.Scalar):
            x = X if cls is not small.Scalar else numbers(5, 3)
            for plan in (Plan(DP2), Plan(DP2, fsdp="dp"), Plan(TP2)):
                for accumulate in (1, 2):
                    model, plain = made(cls), made(cls)
                    step = TrainStep(model, sgd, plan, x, clip=1.0, accumulate=accumulate)
                    found = step.step(x)
                    loss = plain(x)
                    loss.backward()
                    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                    torch.optim.SGD(plain.parameters(), lr=0.1).step()
                    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
                    assert found.grad_norm == pytest.approx(norm.item(), rel=1e-12)
                    for name, p in model.named_parameters():
                        assert p.shape == plain.get_parameter(name).shape
                        whole = p.full_tensor() if isinstance(p, DTensor) else p
                        # both clip by norm + 1e-6, in float64
                        torch.testing.assert_close(whole, plain.get_parameter(name), rtol=1e-9, atol=1e-9)

    on_ranks(2, check)


def test_norms_of_cut_and_whole_gradients_on_two_axes() -> None:
    """All four of (cut or whole) x (dp, tp), with uneven pieces: sqrt(4 x 9 + 2 x 16)."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Parameter(torch.zeros(4, 1))
            self.whole = nn.Parameter(torch.zeros(2, 1))

        def forward(self, x: Tensor) -> Tensor:
            return 3 * self.cut.sum() + 4 * self.whole.sum() + 0 * x.sum()

    def check() -> list[float]:
        found = []
        mesh = Layout((2, 2), ("dp", "tp"))
        for axes in ((None, None), ("tp", None), ("dp", None), (("dp", "tp"), None), ("tp", "dp")):
            params = {"cut": mesh(axes[0], None), "whole": mesh(axes[1], None)}
            step = TrainStep(Norms(), sgd, Plan(mesh, params), torch.ones(4, 2), clip=1.0)
            found.append(step.step(torch.ones(4, 2)).grad_norm)
        return found

    for norms in on_ranks(4, check):
        assert norms == pytest.approx([68**0.5] * 5, rel=1e-6)
