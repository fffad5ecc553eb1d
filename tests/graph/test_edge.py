"""Between two meshes: sums are added in the dtype that the plan says, and a region has one mesh."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hyperparallel as hp
from hyperparallel.errors import PlanError
from hyperparallel.graph import communication
from hyperparallel.graph.edge import Edge, legs_of
from hyperparallel.graph.parts import Part, build_parts
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from hyperparallel.workload import Value

pytestmark = pytest.mark.fake
FRONT, BACK = Mesh((2,), ("tp",), (0, 1)), Mesh((1,), ("tp",), (2,))


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_a_pending_sum_is_added_in_the_dtype_of_the_plan(reduce: str) -> None:
    value = Value("grad", (4, 6), "bfloat16", 2)
    pending, whole = FRONT(None, None, partial={"tp": "sum"}), BACK(None, None)
    edge = Edge("edge grad", value, 0, 1, True, pending, whole, reduce=reduce)
    nodes = legs_of(edge, 0)[0].nodes
    sums = (communication.all_reduce_start, communication.reduce_scatter_start)
    (start,) = (node for node in nodes if node.target in sums)
    assert start.meta["transfer"].dtype == reduce
    casts = [n.kwargs["dtype"] for n in nodes if n.target is torch.ops.aten._to_copy.default]
    assert casts == ([torch.float32, torch.bfloat16] if reduce == "float32" else [])


doubled = hp.local_region(lambda x: 2 * x, [("tp", None)], ("tp", None))


class Doubling(nn.Module):
    """A region in its second half."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return doubled(self.back(self.front(x))).sum()


def test_a_region_in_a_part_on_another_mesh_is_refused() -> None:
    meshes = [Mesh((2,), ("tp",), ranks) for ranks in ((0, 1), (2, 3))]
    parts = [Part([name], Plan(mesh)) for name, mesh in zip(("front", "back"), meshes, strict=True)]
    with pytest.raises(PlanError, match=r"the region .* in part 1, on .*2, 3.*the first part"):
        build_parts(Doubling(), parts, (torch.zeros(4, 4),))
