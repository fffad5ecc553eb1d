"""What was declared cut is computed with as it lies, also behind views of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hyperparallel as hp
from hyperparallel.cluster import Rates
from hyperparallel.graph.build import Built, build

pytestmark = pytest.mark.fake

VOCABULARY, WIDTH, ROWS = 4096, 64, 1024
TP2 = hp.Layout((2,), ("tp",))


class Head(nn.Module):
    """A norm, a head over a vocabulary, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.norm(x)), labels)}


def built(rates: Rates | None = None) -> Built:
    batch = {"x": torch.randn(ROWS, WIDTH), "labels": torch.randint(0, VOCABULARY, (ROWS,))}
    plan = hp.Plan(TP2, params={"head.weight": TP2("tp", None)})
    return build(Head(), plan, (), batch, loss="loss", rates=rates)


@pytest.mark.parametrize("rates", [None, Rates(90e9, 8e9, 3e9, 20e-6)])
def test_neither_a_declared_head_nor_its_logits_are_gathered(rates: Rates | None) -> None:
    transfers = built(rates).rank_program(0).transfers()
    largest = VOCABULARY * WIDTH * 4 // 2
    assert all(t.num_bytes < largest for t in transfers), transfers
    assert {"_log_softmax", "nll_loss_forward"} <= {name for t in transfers for name in t.value.split(", ")}


def test_gathering_what_was_declared_cut_needs_a_tenfold_gain() -> None:
    """Arithmetic and bytes for nothing, starts dear: gathering the head alone would save three starts."""
    dear_starts = Rates(1e18, 1e14, 1e14, latency_seconds=1e-3)
    transfers = built(dear_starts).rank_program(0).transfers()
    gathers = [t for t in transfers if t.kind == "all_gather"]
    assert not any(t.module == "head" and not t.backward for t in gathers), transfers
