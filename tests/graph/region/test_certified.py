"""Regions inside models, on virtual ranks: results and gradients are those of the model without them."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperparallel as hp
from hyperparallel.graph import communication
from hyperparallel.graph.build import build
from hyperparallel.graph.region.segments import Segment
from tests.graph.region.regions import (
    HEADS,
    FromFirst,
    Mlp,
    Stack,
    less_first,
    pending_mlp,
    reduced_mlp,
    ring_attention,
)
from tests.runtime.module.small import made, numbers

pytestmark = pytest.mark.fake
RING = hp.local_region(ring_attention, [HEADS] * 3, HEADS)
SKIPPING = hp.local_region(functools.partial(ring_attention, skip=True), [HEADS] * 3, HEADS, name="skipping")
TP = hp.Layout((2, 2), ("dp", "tp"))


def like(plain: nn.Module, cls: type[nn.Module], *args: Any) -> nn.Module:
    """A module of another form with the same parameters."""
    model = made(cls, *args)
    model.load_state_dict(plain.state_dict())
    return model


def grads_of(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(model(*batch), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), grads, strict=True))


@pytest.mark.parametrize("region", [RING, SKIPPING], ids=["every block", "skipping the future"])
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_ring_attention_is_attention(region: Any, shape: tuple[int, int]) -> None:
    """Skipping ranks compute different amounts between the same collectives."""
    x = numbers(2, 8, 8)
    plain = made(Stack)
    model = like(plain, Stack, region)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-13, atol=1e-13)
    for name, grad in grads_of(plain, x).items():
        torch.testing.assert_close(grads_of(model, x)[name], grad, rtol=1e-12, atol=1e-12)
    found = hp.certify(model, hp.Plan(hp.Layout(shape, ("dp", "cp"))), x)
    assert found.holds(1e-13), str(found)
    assert "grad of blocks.0.qkv.weight" in found.errors


def test_ring_attention_starts_sending_before_it_computes() -> None:
    """The exchange of the next keys and values is under way while a block is worked on."""
    plan = hp.Plan(hp.Layout((1, 4), ("dp", "cp")))
    program = build(made(Stack, RING), plan, (numbers(2, 8, 8),)).rank_program(0)
    seen = [n.target for n in program.graph.nodes if not n.meta.get("backward")]
    first = seen.index(communication.permute_start)
    after = [t for t in seen[first:] if t is communication.wait or isinstance(t, Segment)]
    assert isinstance(after[0], Segment), "the first thing behind the starts is work, not a wait"
    assert seen[first : first + 4].count(communication.permute_start) == 2


@pytest.mark.parametrize("region", [reduced_mlp, pending_mlp], ids=["reduced", "pending"])
@pytest.mark.parametrize("mesh", [TP, hp.Layout((1, 4), ("dp", "tp")), hp.Layout((2, 2), ("tp", "dp"))])
def test_a_tensor_parallel_mlp_by_hand(region: Any, mesh: hp.Mesh) -> None:
    plain = made(Mlp)
    model = like(plain, Mlp, region)
    torch.testing.assert_close(model(numbers(5, 4)), plain(numbers(5, 4)), rtol=1e-13, atol=1e-13)
    found = hp.certify(model, hp.Plan(mesh), numbers(5, 4))
    assert found.holds(1e-13), str(found)


def test_a_pending_result_leaves_the_reduction_to_the_program_around() -> None:
    """One all-reduce over tp each way; reducing inside costs one more, of the gradient that was whole."""

    def reductions(region: Any) -> list[str]:
        derived = hp.derive(made(Mlp, region), hp.Plan(TP), numbers(4, 4))
        return [c.phase for c in derived.communications if "tp" in c.axes for _ in range(c.count)]

    assert reductions(pending_mlp) == ["forward", "backward"]
    assert reductions(reduced_mlp) == ["forward", "backward", "backward"]


def test_a_deep_stack_is_traced_as_four_blocks() -> None:
    calls = []

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return ring_attention(q, k, v)

    region = hp.local_region(counted, [HEADS] * 3, HEADS)
    model, x, plan = made(Stack, region, 8), numbers(2, 4, 8), hp.Plan(hp.Layout((2, 2), ("dp", "cp")))
    built = build(model, plan, (x,))
    assert len(calls) < 8 * 4, "eight blocks on four ranks rehearsed one by one"
    ops = [op for op in built.workload.ops if op.layouts]
    assert len(ops) == 16 and len({op.target for op in ops}) == 2
    found = hp.certify(model, plan, x)
    assert found.holds(1e-12), str(found)


def test_explain_says_that_a_region_declared_a_layout() -> None:
    derived = hp.derive(made(Mlp, pending_mlp), hp.Plan(TP), numbers(4, 4))
    assert "declared by the region pending_mlp_code" in derived.explain("up.weight")
    made_by = [v for v in derived.values if "pending_mlp_code" in v.op]
    assert len(made_by) == 1 and made_by[0].layout == '("dp", None, partial={"tp": "sum"})'
    assert "which declares it" in derived.explain(made_by[0].value)
    inner = [c for c in hp.derive(made(Mlp, reduced_mlp), hp.Plan(TP), numbers(4, 4)).communications
             if "mlp_code asks for it" in c.reason]  # fmt: skip
    assert {(c.kind, c.phase) for c in inner} == {("all_reduce", "forward"), ("all_reduce", "backward")}


class Wrapped(nn.Module):
    """Parameters into a region and the sum of what comes out, weighed by distinct numbers."""

    def __init__(self, region: Any, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        results = self.region(*(value + x.sum() for value in self.values))
        results = results if isinstance(results, tuple) else (results,)
        return sum(
            (torch.linspace(0.5, 1.5, y.numel()).double().view(y.shape) * y.pow(2)).sum() for y in results
        )  # type: ignore[return-value]


def certified(region: Any, *shapes: tuple[int, ...], mesh: hp.Mesh = TP, tolerance: float = 1e-12) -> None:
    found = hp.certify(made(Wrapped, region, *shapes), hp.Plan(mesh, batch=()), numbers(2))
    assert found.holds(tolerance), str(found)


def gathers(x: Tensor) -> Tensor:
    whole = hp.all_gather(x, "tp", dim=1)
    return (whole.sum(1, keepdim=True) * x).cumsum(0)


def scatters(x: Tensor) -> Tensor:
    return hp.reduce_scatter(hp.all_gather(x, "tp", dim=0) * 2.0 / hp.axis_size("tp"), "tp", dim=0)


def exchanges(x: Tensor) -> Tensor:
    rows = hp.all_to_all(x, "tp", split_dim=0, concat_dim=1)
    return hp.all_to_all(rows.softmax(1), "tp", split_dim=1, concat_dim=0)


def largest(x: Tensor) -> Tensor:
    top = hp.all_reduce(x.detach().amax(1, keepdim=True), "tp", "max")
    weights = torch.exp(x - top)
    return weights / hp.all_reduce(weights.sum(1, keepdim=True), "tp")


def averages(x: Tensor) -> Tensor:
    return x - hp.all_reduce(x.mean(1, keepdim=True), "tp", "avg")


@pytest.mark.parametrize("code", [gathers, exchanges, largest, averages])
def test_collectives_along_columns(code: Any) -> None:
    certified(hp.local_region(code, [(None, "tp")], (None, "tp")), (4, 6))
    certified(hp.local_region(code, [("dp", "tp")], ("dp", "tp")), (4, 8)) if code is not gathers else None


def test_reduce_scatter_returns_the_pieces_of_a_layout() -> None:
    certified(hp.local_region(scatters, [("tp", None)], ("tp", None)), (6, 3))


def test_uneven_pieces() -> None:
    """Sizes differ from rank to rank, empty pieces included; collectives know those of all members."""
    mesh = hp.Layout((4,), ("tp",))
    for code in (gathers, largest):
        certified(hp.local_region(code, [(None, "tp")], (None, "tp")), (4, 7), mesh=mesh)
    certified(hp.local_region(scatters, [("tp", None)], ("tp", None)), (5, 3), mesh=mesh)


@pytest.mark.parametrize("rows", [4, 5, 7])
@pytest.mark.parametrize("root", range(4))
def test_the_piece_of_one_rank_on_all(root: int, rows: int) -> None:
    """Pieces of 5 rows are 2, 2, 1 and none; what comes back to the root is the sum of all gradients."""
    chunk = -(-rows // 4)

    def code(x: Tensor) -> Tensor:
        return x.sin() * (1 + hp.broadcast(x, "tp", root).pow(2).sum(0))

    def meaning(x: Tensor) -> Tensor:
        return x.sin() * (1 + x[root * chunk : (root + 1) * chunk].pow(2).sum(0))

    mesh, cut = hp.Layout((1, 4), ("dp", "tp")), ("tp", None)
    certified(hp.local_region(code, [cut], cut, mesh=mesh, reference=meaning), (rows, 3), mesh=mesh)
    certified(hp.local_region(code, [cut], cut, mesh=mesh), (rows, 3), mesh=mesh)
    whole = hp.local_region(code, [cut], cut, mesh=mesh)
    x = numbers(rows, 3).requires_grad_()
    torch.testing.assert_close(whole(x), meaning(x), rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(f(x).cos().sum(), x)[0] for f in (whole, meaning)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_rows_less_the_first_row_of_all() -> None:
    """One broadcast forward, one reduction to the root backward, and a reason for both."""
    plain = made(FromFirst)
    model = like(plain, FromFirst, less_first)
    for rows in (4, 5):
        torch.testing.assert_close(model(numbers(rows, 4)), plain(numbers(rows, 4)), rtol=1e-13, atol=1e-13)
        assert hp.certify(model, hp.Plan(TP), numbers(rows, 4)).holds(1e-13)
    inner = [c for c in hp.derive(model, hp.Plan(TP), numbers(4, 4)).communications
             if "from_first asks for it" in c.reason]  # fmt: skip
    assert {(c.kind, c.phase) for c in inner} == {("broadcast", "forward"), ("reduce_scatter", "backward")}


def test_code_that_differs_by_rank_between_collectives() -> None:
    """A slice that is everything on one rank, a branch with other ops, a number that is 0 or 1."""

    def code(x: Tensor) -> Tensor:
        here = hp.axis_index("tp")
        whole = hp.all_gather(x, "tp")[here:]
        extra = whole.sum() if here else whole.pow(2).mean() + whole.sin().sum()
        return hp.all_reduce(extra * (here + 1) + x.sum() * here, "tp")

    mesh = hp.Layout((1, 4), ("dp", "tp"))
    certified(hp.local_region(code, [("tp",)], (), mesh=mesh), (8,), mesh=mesh)


def test_a_collective_that_not_every_rank_uses() -> None:
    """Its gradient is zero there; the backward communicates all the same."""

    def code(x: Tensor) -> Tensor:
        before = hp.ppermute(x, "tp", [(0, 1), (1, 2)])
        return x * 2 if hp.axis_index("tp") == 0 else x + before.sin()

    mesh = hp.Layout((1, 4), ("dp", "tp"))
    certified(hp.local_region(code, [("tp", None)], ("tp", None), mesh=mesh), (8, 2), mesh=mesh)


def test_several_results_numbers_and_what_is_not_differentiable() -> None:
    def code(x: Tensor, y: Tensor, power: int, *, shift: float) -> tuple[Tensor, Tensor, Tensor]:
        return x.pow(power) + shift, hp.all_reduce(y, ("dp", "tp")), x.detach().argmax(1)

    region = hp.local_region(code, [("dp", None), None], [("dp", None), None, ("dp",)], mesh=TP)

    def call(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b, best = region(x, y, 3, shift=0.5)
        return a * (best[:, None] + 1), b

    certified(call, (4, 3), (2, 2))


class Methods(nn.Module):
    """A region as a method, with a reference and a parameter that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.power = 2

    def dense(self, x: Tensor, w: Tensor) -> Tensor:
        return (x * w).pow(self.power).sum(0)

    @hp.local_region(in_layouts=[("dp", "tp"), ("tp",)], out_layouts=("tp", {"dp": "sum"}), reference=dense)
    def columns(self, x: Tensor, w: Tensor) -> Tensor:
        return (x * w).pow(self.power).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.columns(x, self.weight).pow(2).sum()


def test_a_method_with_a_reference() -> None:
    model, x = made(Methods), numbers(6, 4)
    found = hp.certify(model, hp.Plan(TP), x)
    assert found.holds(1e-13), str(found)
    model.power = 3
    assert hp.certify(model, hp.Plan(TP), x).holds(1e-13)


def test_a_certificate_tells_code_that_is_not_its_reference() -> None:
    wrong = hp.local_region(lambda x: x * 2, [("dp", "tp")], ("dp", "tp"), reference=lambda x: x * 2.001)
    found = hp.certify(made(Wrapped, wrong, (4, 4)), hp.Plan(TP, batch=()), numbers(2))
    assert not found.holds(1e-6)
    forgot = hp.local_region(lambda x: x.sum(0), [("tp", None)], (None,))
    assert not hp.certify(made(Wrapped, forgot, (4, 4)), hp.Plan(TP, batch=()), numbers(2)).holds(1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_in_and_out(seed: int) -> None:
    """Products summed over dims that are cut are pending there; everything else is as it was."""
    draw = random.Random(seed)
    mesh = hp.Layout(draw.choice([(2, 2), (4, 1), (3, 2)]), draw.choice([("dp", "tp"), ("tp", "dp")]))
    ndim = draw.randint(1, 3)
    shape = tuple(draw.randint(2, 7) for _ in range(ndim))
    dims: list[tuple[str, ...]] = [() for _ in shape]
    for axis in draw.sample(["dp", "tp"], draw.randint(0, 2)):
        dims[draw.randrange(ndim)] += (axis,)
    summed = draw.randrange(ndim)
    kept = tuple(d for i, d in enumerate(dims) if i != summed)
    pending = dict.fromkeys(dims[summed], "sum")

    def code(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y).sum(summed), x.sin() * y

    region = hp.local_region(code, [tuple(dims)] * 2, [(*kept, pending), tuple(dims)])
    certified(region, shape, shape, mesh=mesh)
