"""What a region means without a plan: as the only rank, as all ranks of its mesh, or by its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hyperparallel as hp
from hyperparallel.errors import UserError
from hyperparallel.graph.capture.capture import capture
from tests.graph.region.regions import HEADS, Stack, dense_attention, ring_attention
from tests.runtime.module.small import made, numbers

pytestmark = pytest.mark.fake
MESH = hp.Layout((2, 2), ("dp", "cp"))


def test_alone_every_axis_has_size_one() -> None:
    def code(x: Tensor) -> Tensor:
        assert (hp.axis_index("tp"), hp.axis_size(("dp", "tp"))) == (0, 1)
        y = hp.all_reduce(x, "tp") + hp.all_gather(x, "tp") + hp.reduce_scatter(x, "tp", 1)
        assert hp.broadcast(x, ("dp", "tp")) is x
        return y + hp.all_to_all(x, "tp", 0, 1) + hp.ppermute(x, "tp", 1) + hp.ppermute(x, "tp", [])

    x = numbers(3, 4)
    assert torch.equal(hp.local_region(code, ("tp", None), None)(x), 5 * x)


def test_on_a_mesh_of_its_own_it_is_all_ranks() -> None:
    """Autograd through the emulation is an oracle that shares no formula with the program."""
    q, k, v = (numbers(2, 2, 8, 3, seed=i).requires_grad_() for i in range(3))
    for region in (
        hp.local_region(ring_attention, [HEADS] * 3, HEADS, mesh=MESH),
        hp.local_region(ring_attention, [MESH(*HEADS)] * 3, MESH(*HEADS)),
    ):
        got, true = region(q, k, v), dense_attention(q, k, v)
        torch.testing.assert_close(got, true, rtol=1e-13, atol=1e-13)
        weights = numbers(*true.shape, seed=9)
        both = (torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (got, true))
        for one, two in zip(*both, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_meaning_that_depends_on_the_number_of_ranks() -> None:
    """Certificates compare with the meaning: of all ranks where the region has a mesh, else of one."""

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(2, keepdim=True)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(region(x))

    region: Any = hp.local_region(centred, [("dp", None, "cp")], ("dp", None, "cp"), mesh=MESH)
    assert hp.certify(made(Model), hp.Plan(MESH), numbers(2, 4, 8)).holds(1e-12)
    region = hp.local_region(centred, [("dp", None, "cp")], ("dp", None, "cp"))
    assert not hp.certify(made(Model), hp.Plan(MESH), numbers(2, 4, 8)).holds(1e-6)


def test_a_mistake_shows_without_a_plan() -> None:
    x = numbers(4, 4)
    with pytest.raises(UserError, match="result 0 of code: got 'another value on rank 1"):
        hp.local_region(lambda x: x.sum(1), ("dp", "cp"), ("dp",), mesh=MESH, name="code")(x)
    with pytest.raises(UserError, match="random numbers in code"):
        hp.local_region(torch.rand_like, ("dp", "cp"), ("dp", "cp"), mesh=MESH, name="code")(x)
    with pytest.raises(ZeroDivisionError):
        hp.local_region(lambda x: x / (1 // hp.axis_index("dp")), ("dp", "cp"), ("dp", "cp"), mesh=MESH)(x)
    with pytest.raises(UserError, match="2 entries"):
        hp.local_region(lambda x: x, ("dp",), None)(x)


def test_a_reference_is_what_it_means() -> None:
    region = hp.local_region(ring_attention, [HEADS] * 3, HEADS, mesh=MESH, reference=dense_attention)
    q, k, v = (numbers(2, 2, 8, 3, seed=i) for i in range(3))
    assert torch.equal(region(q, k, v), dense_attention(q, k, v))


def test_capture_without_a_plan_holds_the_code_of_one_rank() -> None:
    region = hp.local_region(ring_attention, [HEADS] * 3, HEADS)
    found = capture(made(Stack, region), (numbers(2, 8, 8),))
    assert not any("local_region" in str(n.target) for n in found.graph.nodes)
    assert set(found.grads) == {f"blocks.0.{n}" for n in ("qkv.weight", "out.weight", "out.bias")}
