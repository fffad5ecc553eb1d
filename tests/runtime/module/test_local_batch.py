"""One cut of a batch to a rank's rows, whoever asks for it: pieces by hand, and all front doors alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hyperparallel.graph.build import build
from hyperparallel.graph.parts import Part
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.local_batch import input_cuts, local_leaves
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.runtime.module.parts import PartsStep
from hyperparallel.runtime.module.step import TrainStep
from tests.ranks import run_ranks
from tests.runtime.module import small
from tests.runtime.module.small import made, numbers

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("axes", "rows"),
    [
        ((("dp", "tp"), None), [(0, 2), (2, 3), (3, 5), (5, 6)]),
        ((("tp", "dp"), None), [(0, 2), (3, 5), (2, 3), (5, 6)]),
        (("dp", None), [(0, 3), (0, 3), (3, 6), (3, 6)]),
        ((None, None), [(0, 6)] * 4),
    ],
)
def test_pieces_are_the_rows_that_a_layout_gives_a_rank(axes: Any, rows: list[tuple[int, int]]) -> None:
    """6 rows in halves, halves of them in 2 + 1; the order of axes says which rank comes first."""
    mesh = Layout((2, 2), ("dp", "tp"))
    x = numbers(6, 4)
    built = build(made(small.Rows), Plan(mesh, inputs={"x": mesh(*axes)}), (x,))
    for rank, (first, end) in enumerate(rows):
        (piece,) = local_leaves([x], input_cuts(built.rank_program(rank)).values(), CPU)
        assert torch.equal(piece, x[first:end])
        assert piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "a view, no copy"


def test_every_front_door_takes_a_batch_whole_or_as_a_dtensor() -> None:
    """And cuts a DTensor by its plan, however the DTensor is cut."""
    x = numbers(5, 4)
    model = made(small.Rows)
    true = float(model(x).detach())

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.0)

    def run(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("columns",))
        spread = distribute_tensor(x, mesh, [Shard(1)])
        plan = Plan(Layout((2,), ("dp",)))
        alone = [Plan(Mesh((1,), ("dp",), (r,))) for r in (0, 1)]
        parts = {"up": Part(["up"], plan), "down": Part(["down"], alone[1])}
        found = []
        for batch in (x, spread):
            assert isinstance(batch, DTensor) == (batch is spread)
            found.append(float(parallelize(made(small.Rows), plan, x)(batch).detach()))
            found.append(TrainStep(made(small.Rows), sgd, plan, x).step(batch).loss)
            found.append(PartsStep(made(small.Rows), sgd, parts, x).step(batch).loss)
        return found

    for found in run_ranks(2, run, timeout=110):
        assert found == pytest.approx([true] * 6, rel=1e-12)


def test_a_piece_needs_no_gradient() -> None:
    x: Tensor = numbers(6, 4).requires_grad_()
    built = build(made(small.Rows), Plan(Layout((2,), ("dp",))), (x.detach(),))
    (piece,) = local_leaves([x], input_cuts(built.rank_program(1)).values(), CPU)
    assert not piece.requires_grad and torch.equal(piece, x[3:])
