"""Certificates: small modules under many plans, every model family, and a certificate that must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperparallel.graph.build import build
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.exec.virtual import Lockstep
from hyperparallel.runtime.module.certify import certify, certify_built
from tests.graph.capture import families
from tests.runtime.module import small
from tests.runtime.module.small import integers, made, numbers

pytestmark = pytest.mark.fake
LABELS = torch.tensor([[1, -100, -100], [2, 3, 4], [-100] * 3, [-100, -100, 5]])
TARGET = torch.tensor([0, 6, -100, 2])
PADDED = torch.tensor([0, 1, 5, 5, 6, 4])

CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tied": (lambda: made(small.Tied), torch.arange(7)),
    "tied, rows": (lambda: made(small.Tied), integers(7, 4, 5)),
    "no dims": (lambda: made(small.Scalar), numbers(5, 3)),
    "lora": (lambda: made(small.Lora), numbers(5, 8)),
    "valid tokens": (lambda: made(small.TokenLoss), (numbers(4, 3, 5), LABELS)),
    "all ignored": (lambda: made(small.TokenLoss), (numbers(4, 3, 5), LABELS * 0 - 100)),
    "biases": (lambda: made(small.Rows), numbers(5, 4)),
    "padding 1": (lambda: made(small.Padded, 1), PADDED),
    "padding 5": (lambda: made(small.Padded, 5), PADDED),
    "padding -1": (lambda: made(small.Padded, -1), PADDED),
    "no padding": (lambda: made(small.Padded, None), PADDED),
    "classes": (lambda: made(small.Classes), (numbers(4, 4), TARGET)),
    "classes, sum": (lambda: made(small.Classes, "sum"), (numbers(4, 4), TARGET)),
    "classes, none": (lambda: made(small.Classes, "none"), (numbers(4, 4), TARGET)),
    "classes, weights": (lambda: made(small.Classes, "mean", True), (numbers(4, 4), TARGET)),
    "classes, smooth": (lambda: made(small.Classes, "mean", False, 0.1), (numbers(4, 4), TARGET)),
    "grouped heads": (lambda: made(small.Grouped), numbers(2, 5, 32)),
    "3 kv heads": (lambda: made(small.Grouped, 6, 3), numbers(2, 5, 24)),
    "constants": (lambda: made(small.Constants), numbers(2, 5, 8)),
    "norm": (lambda: made(small.Norm), numbers(1, 6, 4)),
    "batch norm": (lambda: made(small.Batch), numbers(7, 4)),
    "statistics": (lambda: made(small.Statistics), numbers(3, 2, 5)),
    "nested": (lambda: made(small.Nested), {"batch": {"x": {"y": numbers(5, 4)}}}),
    "dropout": (lambda: made(small.Dropped), numbers(5, 4)),
}


def plans(model: nn.Module) -> dict[str, Plan]:
    """Batch axes, weights cut along either dim, both, and rank counts that divide nothing."""

    def plan(shape: tuple[int, ...], names: tuple[str, ...], dim: int | None, **more: Any) -> Plan:
        mesh = Mesh(shape, names)
        matrices = {n: p.dim() for n, p in model.named_parameters() if p.dim() > 1}
        cut = {n: mesh(*("tp" if d == dim else None for d in range(k))) for n, k in matrices.items()}
        return Plan(mesh, cut if dim is not None else {}, **more)

    return {
        "dp3": plan((3,), ("dp",), None),
        "fsdp4": plan((4,), ("dp",), None, fsdp="dp"),
        "derived": plan((4,), ("tp",), None),
        "rows": plan((4,), ("tp",), 0),
        "columns": plan((3,), ("tp",), 1),
        "fsdp2 x rows": plan((2, 2), ("dp", "tp"), 0, fsdp="dp"),
        "zero2 x columns": plan((3, 2), ("dp", "tp"), 1, fsdp="dp", zero=2),
    }


@pytest.mark.parametrize("case", CASES)
def test_small_modules_under_many_plans(case: str) -> None:
    """float64: what is left is the order of additions, some 1e-16 each, a hundred of them.

    Gradients that are zero in truth (a bias before a normalisation) are compared to a thousandth of
    the largest gradient, which makes it 1e-12.
    """
    make, batch = CASES[case]
    model = make()
    for name, plan in plans(model).items():
        found = certify(model, plan, batch)
        assert found.holds(1e-12), f"{name}: {found}"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral", "gemma", "bert", "vit"])
def test_model_families(family: str) -> None:
    """float64 weights; Hugging Face's norms and losses go through float32, hence 1e-6."""
    more = {"dropout": 0.1} if family in ("gpt2", "bert") else {}
    model, batch = families.seeded(family, 2, **more)
    model = model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    mesh = Layout((2, 2), ("dp", "tp"))
    pattern, dims = {
        "gpt2": ("*.c_fc.weight", (None, "tp")),
        "bert": ("*.intermediate.dense.weight", ("tp", None)),
        "vit": ("*.fc1.weight", ("tp", None)),
    }.get(family, ("*.gate_proj.weight", ("tp", None)))
    for plan in (
        Plan(mesh, {pattern: mesh(*dims)}, fsdp="dp"),
        Plan(Layout((3,), ("dp",))),
    ):
        found = certify(model, plan, batch)
        assert found.holds(1e-6), str(found)


def test_frozen_modules_and_the_model_itself_are_left_as_they_are() -> None:
    model = made(small.Batch)
    model.norm.eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    mesh = Layout((2,), ("dp",))
    assert certify(model, Plan(mesh), numbers(5, 4)).holds(1e-13)
    assert model.training and not model.norm.training
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


class Failing(nn.Module):
    """Captured well, and fails when it runs: once for the graph, once for real."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError
        out: Tensor = self.linear(F.dropout(x, 0.5, self.training)).sum()
        return out


def test_generators_and_modes_are_left_as_they_are_also_after_an_error() -> None:
    model, batch, plan = made(Failing).eval(), numbers(4, 4), Plan(Layout((2,), ("dp",)))
    state = torch.get_rng_state()
    assert certify(model, plan, batch).holds()
    assert torch.equal(state, torch.get_rng_state()) and not model.training
    built = build(model, plan, (batch,), {})
    model.fails = True
    with pytest.raises(ZeroDivisionError):
        certify_built(model, built, (batch,), {})
    assert not model.training


class Sometimes(nn.Module):
    """Results that are NaN, infinite, integer and logical."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {
            "loss": y.pow(2).mean(),
            "log": torch.log(y),
            "inverse": 1.0 / (y * 0.0).abs(),
            "best": y.argmax(-1),
            "above": y > 0,
        }


def test_nan_and_integers_compare() -> None:
    mesh = Layout((2,), ("dp",))
    found = certify(made(Sometimes), Plan(mesh), numbers(5, 4))
    assert found.holds(1e-13), str(found)
    assert {"log", "inverse", "best", "above"} <= set(found.errors)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda x: x * (1 + 1e-6), "error"),
        (lambda x: x * float("nan"), "nan"),
        (lambda x: x + (x.abs() > 1e-3), "large"),
    ],
)
def test_a_wrong_program_does_not_certify(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor], what: str
) -> None:
    from hyperparallel.graph.build import build

    model, batch = made(small.Rows), numbers(5, 4)
    built = build(model, Plan(Layout((2,), ("dp",))), (batch,))
    assert certify_built(model, built, (batch,), {}).holds(1e-13)
    run = Lockstep.run
    monkeypatch.setattr(
        Lockstep, "run", lambda self, rows: [[spoil(x) for x in row] for row in run(self, rows)]
    )
    assert not certify_built(model, built, (batch,), {}).holds(1e-9), what


def test_differing_replicas_do_not_certify(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Lockstep.run

    def spoiled(self: Lockstep, rows: Any) -> Any:
        results = run(self, rows)
        return [results[0], [x * (1 + 1e-14) for x in results[1]]]

    monkeypatch.setattr(Lockstep, "run", spoiled)
    found = certify(made(small.Rows), Plan(Layout((2,), ("dp",))), numbers(5, 4))
    assert found.largest[1] < 1e-12 and not found.replicas_agree and not found.holds(1e-9)
    assert "DIFFER" in str(found)


@torch.library.custom_op("hyperparallel_tests::sorted_all", mutates_args=())
def sorted_all(x: Tensor) -> Tensor:
    return x.flatten().sort()[0].view_as(x).clone()


@sorted_all.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Unknown(nn.Module):
    """An op that has no rule and that nothing can cut, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.pow(2).sum() + (sorted_all(y.detach()) * y).sum() + sorted_all(2 * y.detach()).sum()


def test_an_unknown_op_is_run_whole_with_one_warning() -> None:
    mesh = Layout((2, 2), ("dp", "tp"))
    plan = Plan(mesh, {"linear.weight": mesh("tp", None)})
    with pytest.warns(UserWarning, match=r"sorted_all.*has no sharding rule") as caught:
        found = certify(made(Unknown), plan, numbers(5, 4))
        assert certify(made(Unknown), Plan(mesh), numbers(5, 4)).holds(1e-12)
    assert found.holds(1e-12), str(found)
    assert len(caught) == 1 and "(240 bytes)" in str(caught[0].message)
