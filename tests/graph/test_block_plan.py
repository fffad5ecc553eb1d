"""What two declared weights of a Llama block derive to: Megatron's plan, counted on the program."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shard.block import LARGE, SMALL, BlockLoss, BlockSize
from hyperparallel.graph.build import Built, build
from hyperparallel.layout import Layout
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.module.certify import certify

pytestmark = pytest.mark.fake
DECLARED = ("*.o.weight", "*.down.weight")


def plan_on(shape: tuple[int, ...], names: tuple[str, ...]) -> Plan:
    mesh = Layout(shape, names)
    return Plan(mesh, {pattern: mesh(None, "tp") for pattern in DECLARED})


def built(size: BlockSize) -> Built:
    with torch.device("meta"):
        model = BlockLoss(size)
        x = torch.empty(size.batch, size.sequence, size.model_dim, requires_grad=True)
    return build(model, plan_on((2,), ("tp",)), (x,), loss="")


@pytest.mark.parametrize(("size", "most"), [(SMALL, 3), (LARGE, 4)], ids=["D=64", "D=512"])
def test_no_more_collectives_and_bytes_than_by_hand(size: BlockSize, most: int) -> None:
    transfers = built(size).rank_program(0).transfers()
    by_hand = 4 * size.batch * size.sequence * size.model_dim * 4  # 4 all-reduces; one receives 2 (n-1)/n
    assert len(transfers) <= most
    assert sum(t.num_bytes for t in transfers) <= by_hand


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["D=64", "D=512"])
def test_every_product_is_divided(size: BlockSize) -> None:
    """Heads stay cut through [batch, heads] -> [batch * heads], where they are the inner factor."""
    found = built(size)
    products = [op for op in found.workload.ops if op.target in ("aten.mm.default", "aten.bmm.default")]
    assert len(products) == 27
    for op in products:
        assert [a for cut in found.decisions.cuts[op.name].values() for a in cut.all_axes] == ["tp"], op.name


@pytest.mark.parametrize(
    "mesh", [((2,), ("tp",)), ((2, 2), ("dp", "tp")), ((3, 2), ("dp", "tp")), ((2, 2), ("tp", "dp"))]
)
def test_inner_cuts_compute_the_same(mesh: tuple[tuple[int, ...], tuple[str, ...]]) -> None:
    """Also with batches of 4 that three ranks cut unevenly around the heads."""
    torch.manual_seed(0)
    size = BlockSize(batch=4, sequence=6, model_dim=16, num_heads=4)
    x = torch.randn(4, 6, 16, dtype=torch.float64, requires_grad=True)
    certificate = certify(BlockLoss(size).double(), plan_on(*mesh), (x,))
    assert certificate.holds(1e-12), str(certificate)
