"""The simulation is a judge: it must find wrong pieces, disagreeing copies and wrong shapes."""

from __future__ import annotations

import numpy as np
import pytest

from hyperparallel.layout import AllGather, AllReduce, Layout, Mesh, Permute, ReduceScatter
from hyperparallel.layout.emulate import cut, emulate, join

pytestmark = pytest.mark.pure
MESH = Mesh((2, 2), ("dp", "tp"))
TENSOR = np.arange(1, 16).reshape(5, 3)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_pending_summands_differ_and_reduce_to_the_tensor(op: str) -> None:
    layout = MESH("dp", None, partial={"tp": op})
    held = cut(layout, TENSOR, np.random.default_rng(1))
    assert not np.array_equal(held[0], TENSOR[:3])
    assert np.array_equal(join(layout, held, (5, 3)), TENSOR)


def test_a_changed_element_is_found() -> None:
    held = cut(MESH("dp", None), TENSOR)
    held[3] = held[3] + 1
    with pytest.raises(ValueError, match="rank 3 disagrees"):
        join(MESH("dp", None), held, (5, 3))


def test_a_missing_row_is_found() -> None:
    held = cut(MESH("dp", None), TENSOR)
    held[2] = held[2][:1]
    with pytest.raises(ValueError, match="rank 2 holds"):
        join(MESH("dp", None), held, (5, 3))


def test_the_wrong_collective_is_found() -> None:
    src, dst = MESH(None, None, partial={"tp": "sum"}), MESH("tp", None)
    held = cut(src, TENSOR)
    good = emulate([ReduceScatter(("tp",), src, dst, 0, "sum")], held, (5, 3))
    assert np.array_equal(join(dst, good, (5, 3)), TENSOR)
    with pytest.raises(ValueError, match="holds"):
        emulate([AllReduce(("tp",), src, dst, "sum")], held, (5, 3))
    whole = MESH(None, None)
    wrong = emulate([AllReduce(("tp",), src, whole, "max")], held, (5, 3))
    assert not np.array_equal(wrong[0], TENSOR)


def test_gathering_in_the_wrong_order_is_found() -> None:
    src = MESH(("dp", "tp"), None)
    held = emulate(
        [AllGather(("tp", "dp"), src, MESH(None, None), 0)],
        cut(src, TENSOR[:4]), (4, 3),
    )  # fmt: skip
    assert not np.array_equal(held[0], TENSOR[:4])


def test_an_exchange_leaves_no_hole() -> None:
    src, dst = MESH(("dp", "tp"), None), MESH(None, ("tp", "dp"))
    held = emulate([Permute(("dp", "tp"), src, dst)], cut(src, TENSOR), (5, 3))
    assert np.array_equal(join(dst, held, (5, 3)), TENSOR)


def test_a_scalar_on_a_permuted_mesh() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))
    src = Layout.full(mesh, 0).replace(partial={"dp": "sum"})
    held = emulate([AllReduce(("dp",), src, mesh(), "sum")], cut(src, np.array(5)), ())
    assert [int(held[rank]) for rank in range(4)] == [5, 5, 5, 5]
