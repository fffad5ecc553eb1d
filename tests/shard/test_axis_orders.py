"""Any order of axes on a dim: which mesh order agrees, and when strides say the same elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake"; checked on torch 2.13
from torch.distributed.tensor import distribute_tensor

from hyperparallel.errors import LayoutError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.runtime.module.as_dtensor import Presenter, local_piece
from hyperparallel.shard.axis_orders import axis_order, is_said_by_strides, order_from_factors, split_factors
from hyperparallel.shard.spec import Spec, spec_of_layout

MESH = Mesh((2, 3, 2), ("a", "b", "c"))
ORDERS = [order for n in (1, 2, 3) for order in itertools.permutations("abc", n)]


@pytest.mark.pure
@pytest.mark.parametrize("order", ORDERS)
def test_orders_and_split_factors_are_inverse(order: tuple[str, ...]) -> None:
    factors = dict(zip(order, split_factors(MESH, order), strict=True))
    in_mesh_order = [(axis, factors[axis]) for axis in MESH.names if axis in factors]
    assert order_from_factors(MESH, in_mesh_order) == order


@pytest.mark.pure
def test_no_order_has_these_factors() -> None:
    assert order_from_factors(MESH, [("a", 5), ("c", 1)]) is None


@pytest.mark.pure
def test_the_mesh_keeps_its_order_where_it_can() -> None:
    def order(*layouts: Layout) -> tuple[str, ...]:
        return axis_order(MESH, [spec_of_layout(x, (12,) * x.ndim) for x in layouts])

    assert order() == order(MESH("a", "c"), MESH(("a", "c"))) == ("a", "b", "c")
    assert order(MESH(("c", "a"))) == ("c", "b", "a")
    assert order(MESH(("b", "a"), None), MESH(("a", "c"))) == ("b", "a", "c")
    assert order(MESH(("c", "a")), MESH(("a", "b"))) == ("c", "a", "b")
    # A contradiction: one of them is strided, and that is the one that can be.
    assert order(MESH(("c", "a")), MESH(("a", "c"))) == ("a", "b", "c")
    uneven = Mesh((4, 2), ("dp", "tp"))
    specs = [spec_of_layout(uneven(("tp", "dp")), (9,)), spec_of_layout(uneven(("dp", "tp")), (16,))]
    assert axis_order(uneven, specs) == ("tp", "dp")


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def specs(mesh: Mesh, size: int) -> list[Spec]:
    shape = (size, 4)
    return [spec_of_layout(mesh(order, None), shape) for order in ORDERS]


@pytest.mark.fake
@pytest.mark.parametrize("size", [24, 7, 5, 1])
def test_dtensor_deals_what_the_layout_deals(size: int) -> None:
    """Every order on the mesh's own order: either the same piece on every rank, or refused."""
    whole = torch.arange(size * 4).view(size, 4)
    refused = set()
    for rank in range(MESH.size):
        with fake_rank(rank, MESH.size):
            presenter = Presenter.of(MESH, [], torch.device("cpu"))
            for spec in specs(MESH, size):
                axes = spec.layout().dims[0]
                try:
                    placements = presenter.placements(spec)
                except LayoutError as error:
                    assert "uneven pieces" in str(error)
                    refused.add(axes)
                    continue
                made = distribute_tensor(whole, presenter.device_mesh, placements, src_data_rank=None)
                assert torch.equal(made.to_local(), local_piece(whole, spec, rank)), (axes, rank)
    strided = {axes for axes in ORDERS if max(split_factors(MESH, axes)) > 1}
    assert refused == {axes for axes in strided if not is_said_by_strides(MESH, axes, size)}
    assert not refused or size % math.prod(MESH.shape)


@pytest.mark.fake
@pytest.mark.parametrize("order", [order for order in ORDERS if len(order) > 1])
def test_one_order_is_always_presented_by_the_mesh(order: tuple[str, ...]) -> None:
    """Uneven and empty pieces too: the mesh takes the order, and plain placements say the rest."""
    whole = torch.arange(20).view(5, 4)
    spec = spec_of_layout(MESH(order, None), (5, 4))
    for rank in range(0, MESH.size, 5):
        with fake_rank(rank, MESH.size):
            presenter = Presenter.of(MESH, [spec], torch.device("cpu"))
            assert presenter.device_mesh.mesh_dim_names == presenter.mesh.names
            assert presenter.device_mesh.get_coordinate() == presenter.mesh.indices(rank)
            placements = presenter.placements(spec)
            assert all(type(p).__name__ != "_StridedShard" for p in placements)
            made = distribute_tensor(whole, presenter.device_mesh, placements, src_data_rank=None)
            assert torch.equal(made.to_local(), local_piece(whole, spec, rank))


@pytest.mark.fake
def test_a_contradiction_that_no_placement_says_is_refused() -> None:
    mesh = Mesh((3, 3), ("dp", "tp"))
    one, two = (spec_of_layout(mesh(order), (11,)) for order in (("dp", "tp"), ("tp", "dp")))
    with fake_rank(0, 9):
        presenter = Presenter.of(mesh, [one, two], torch.device("cpu"))
        presenter.placements(one)
        presenter.placements(spec_of_layout(mesh(("tp", "dp")), (18,)))
        with pytest.raises(LayoutError, match=r"up\.weight, dim 0: got \('tp', 'dp'\).*or a size that 9"):
            presenter.placements(two, "up.weight")
