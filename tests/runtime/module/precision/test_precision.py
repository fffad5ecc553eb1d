"""bfloat16 on many ranks is as exact as on one: nothing is added up in 16 bits, gathers move 16 bits."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperparallel.errors import PlanError, UserError
from hyperparallel.graph import collective_table
from hyperparallel.graph.build import build
from hyperparallel.graph.capture.precision import computing
from hyperparallel.graph.derive import derived
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.plan.report import text_report
from hyperparallel.runtime.exec import virtual
from hyperparallel.runtime.module.certify import certify
from hyperparallel.runtime.module.parallel import parallelize
from hyperparallel.shard.op_seconds import SMALL_FLOATS
from tests.graph.capture import families
from tests.runtime.module import small
from tests.runtime.module.precision.low_bits import dense_gradients, error, sharded_gradients, true_gradients

pytestmark = pytest.mark.fake
DECLARED: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "gpt2": ("*.c_fc.weight", (None, "tp")),
    "bert": ("*.intermediate.dense.weight", ("tp", None)),
    "vit": ("*.fc1.weight", ("tp", None)),
}
PLANS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "dp4": ((4,), ("dp",)),
    "tp4": ((4,), ("tp",)),
    "fsdp3": ((3,), ("fsdp",)),
    "fsdp2 x tp2": ((2, 2), ("fsdp", "tp")),
    "dp3 x tp2": ((3, 2), ("dp", "tp")),
}


def plan_of(name: str, family: str, **more: Any) -> Plan:
    mesh = Layout(*PLANS[name])
    pattern, dims = DECLARED.get(family, ("*.gate_proj.weight", ("tp", None)))
    params = {pattern: mesh(*dims)} if "tp" in mesh.names else {}
    return Plan(mesh, params, fsdp="fsdp" if "fsdp" in mesh.names else None, **more)


def in_bfloat16(model: nn.Module, batch: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model whose own weights have 16 bits, and its batch."""
    return model.bfloat16(), {k: x.bfloat16() if x.is_floating_point() else x for k, x in batch.items()}


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, str]]:
    """What virtual ranks reduce while the test runs: dtype and operation of every reduction."""
    seen: list[tuple[torch.dtype, str]] = []
    reduce = collective_table.reduce_in_order

    def watched(tensors: Any, op: str) -> Tensor:
        seen.append((tensors[0].dtype, op))
        return reduce(tensors, op)

    monkeypatch.setattr(collective_table, "reduce_in_order", watched)
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "gemma2"])
def test_families_certify_and_reduce_in_float32(family: str, reduced: list[Any]) -> None:
    """Master weights in float32, and weights that are bfloat16 themselves."""
    model, batch = families.seeded(family, 2)
    found = certify(model, plan_of("fsdp2 x tp2", family, compute="bfloat16"), batch)
    assert found.holds(), str(found)
    assert found.precision == "bfloat16" and "bfloat16 on one device is off" in str(found)
    model, batch = in_bfloat16(model, batch)
    found = certify(model, plan_of("dp3 x tp2", family), batch)
    assert found.holds(), f"own weights: {found}"
    assert reduced and not {dtype for dtype, _ in reduced} & {torch.bfloat16, torch.float16}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_error_is_that_of_one_device(family: str, name: str) -> None:
    """Against float64, over four models and batches: on the mean at most a tenth above one device's.

    A sum of partial products rounds each of them instead of the whole once, which costs a few percent.
    """
    built, ratios = None, []
    for seed in range(4):
        torch.manual_seed(seed)
        make, batch_of = families.FAMILIES[family]
        model, batch = make(2).train(), batch_of()
        if built is None:
            built = build(model, plan_of(name, family, compute="bfloat16"), (), batch, loss="loss")
        true = true_gradients(model, batch)
        alone = error(dense_gradients(model, batch, "bfloat16"), true)
        assert 1e-3 < alone < 1e-2  # else this compares nothing
        ratios.append(error(sharded_gradients(built, model, batch), true) / alone)
    assert math.prod(ratios) ** (1 / len(ratios)) < 1.1, ratios
    assert max(ratios) < 1.3, ratios


class TwoLayers(nn.Module):
    """Rows enough that a weight's gradient is a long sum of numbers of one sign."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.b(torch.relu(self.a(x))).pow(2).mean()}


def ring(tensors: Any, op: str) -> Tensor:
    """A reduction that adds in the dtype it is given, as transports between processes do."""
    return sum(tensors[1:], tensors[0])


@pytest.mark.parametrize(("ranks", "worse"), [(8, 1.25), (32, 1.8)])
def test_reducing_in_bfloat16_is_measurably_worse(
    ranks: int, worse: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the float32 reduction does something, and does it where it should."""
    plan = Plan(Layout((ranks,), ("dp",)), compute="bfloat16")
    torch.manual_seed(0)
    model, batch = TwoLayers(), {"x": torch.rand(1024, 32)}
    true = true_gradients(model, batch)
    alone = error(dense_gradients(model, batch, "bfloat16"), true)
    errors = []
    monkeypatch.setattr(collective_table, "reduce_in_order", ring)
    for chosen in (plan, replace(plan, reduce="bfloat16")):
        built = build(model, chosen, (), batch, loss="loss")
        errors.append(error(sharded_gradients(built, model, batch), true))
    assert errors[0] < 1.05 * alone, (alone, errors)
    assert errors[1] > worse * errors[0], (alone, errors)


def test_parameters_are_gathered_in_16_bits_and_gradients_reduced_in_32() -> None:
    model, batch = families.seeded("llama", 2)
    plan = plan_of("fsdp2 x tp2", "llama")
    bytes_of: dict[str | None, dict[str, int]] = {}
    for compute in (None, "bfloat16"):
        chosen = replace(plan, compute=compute)  # no passes: nothing is joined, so that each can be looked at
        record = derived(build(model, chosen, (), batch, loss="loss", rank_passes=()))
        moved = bytes_of[compute] = {"all_gather": 0, "reduce_scatter": 0}
        for item in record.communications:
            if "proj.weight" in item.value:
                moved[item.kind] += item.step_bytes
                gathered = item.kind == "all_gather" and compute
                assert item.dtype == ("bfloat16" if gathered else "float32"), item
            if item.kind in ("all_reduce", "reduce_scatter"):
                assert item.dtype not in SMALL_FLOATS, item
    assert 0 < 2 * bytes_of["bfloat16"]["all_gather"] == bytes_of[None]["all_gather"]
    assert 0 < bytes_of["bfloat16"]["reduce_scatter"] == bytes_of[None]["reduce_scatter"]
    said = text_report(record)
    assert "computed in bfloat16; parameters and their gradients keep their dtype" in said
    assert "16-bit floats are summed over ranks in float32" in said
    assert "(bfloat16) of model.layers.0.mlp.up_proj.weight" in record.explain(
        "model.layers.0.mlp.up_proj.weight"
    )


def test_partial_products_are_summed_in_float32_and_not_rounded_before_the_residual() -> None:
    """The output projections of a block: cast, reduced and added to the residual, all in float32."""
    model, batch = families.seeded("llama", 2)
    mesh = Layout((2,), ("tp",))
    layouts = {name: mesh("tp", None) for name in ("*.q_proj.weight", "*.gate_proj.weight")}
    built = build(model, Plan(mesh, layouts, compute="bfloat16"), (), batch, loss="loss")
    graph = built.rank_program(0).graph
    starts = [n for n in graph.nodes if "transfer" in n.meta and n.meta["transfer"].kind == "all_reduce"]
    moved = [n.meta["transfer"] for n in starts]
    assert len([t for t in moved if not t.backward and t.num_bytes > 64]) >= 4
    assert {t.dtype for t in moved} == {"float32"}
    for start in starts:
        for wait in start.users:
            casts = [u for u in wait.users if u.target is torch.ops.aten._to_copy.default]
            assert not [
                c for c in casts if c.kwargs["dtype"] == torch.bfloat16 and not start.meta["backward"]
            ]


class Spread(nn.Module):
    """Variances, norms and log-sum-exp over rows that are cut, of 16-bit numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.var() + y.std(0).sum() + y.norm() + y.logsumexp(0).sum() + y.mean()


@pytest.mark.parametrize("case", ["spread", "classes", "valid tokens"])
def test_reductions_inside_ops_keep_32_bits(case: str, reduced: list[Any]) -> None:
    """Variances, norms and losses of 16-bit operands exchange float32 sums."""
    make, batch = {
        "spread": (lambda: small.made(Spread), small.numbers(6, 5)),
        "classes": (lambda: small.made(small.Classes), (small.numbers(4, 4), torch.tensor([0, 6, -100, 2]))),
        "valid tokens": (
            lambda: small.made(small.TokenLoss),
            (small.numbers(4, 3, 5), torch.tensor([[1, -100, -100], [2, 3, 4], [-100] * 3, [-100, -100, 5]])),
        ),
    }[case]
    model = make().bfloat16()
    given = batch if isinstance(batch, tuple) else (batch,)
    low = tuple(x.bfloat16() if x.is_floating_point() else x for x in given)
    mesh = Layout((3,), ("tp",))
    for plan in (Plan(Layout((4,), ("dp",))), Plan(mesh, {"*weight": mesh("tp", None)})):
        found = certify(model, plan, low)
        assert found.holds(), str(found)
    sums = [dtype for dtype, op in reduced if op == "sum"]
    assert sums and torch.bfloat16 not in sums


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"compute": "float16"},
            r"compute: got 'float16'; allowed: None or 'bfloat16'; write compute=\"bfloat16\"",
        ),
        ({"compute": "bf16"}, 'write compute="bfloat16" instead'),
        ({"compute": torch.float32}, "compute: got torch.float32"),
        ({"reduce": "float64"}, "reduce: got 'float64'; allowed: 'float32' or 'bfloat16'"),
        ({"reduce": None}, "reduce: got None"),
    ],
)
def test_other_values_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan(Layout((2,), ("dp",)), **fields)


def test_a_dtype_of_torch_is_its_name() -> None:
    plan = Plan(Layout((2,), ("dp",)), compute=torch.bfloat16, reduce=torch.bfloat16)  # type: ignore[arg-type]
    assert (plan.compute, plan.reduce) == ("bfloat16", "bfloat16")
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_autocast_around_a_program() -> None:
    """The plan's own is taken for what it is; another would change dtypes that were decided."""
    batch = {"ids": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3)}
    mesh = Layout((1,), ("dp",))

    def loss(compute: str | None, asked: torch.dtype | None) -> float:
        torch.manual_seed(0)
        model = parallelize(small.NextToken(), Plan(mesh, compute=compute), batch)
        with torch.autocast("cpu", asked, enabled=asked is not None):
            return float(model(**batch)["loss"].detach())

    assert loss("bfloat16", torch.bfloat16) == loss("bfloat16", None) != loss(None, None)
    for compute, asked in ((None, torch.bfloat16), ("bfloat16", torch.float16)):
        with pytest.raises(UserError, match=r"autocast: got .*write Plan\(\.\.\., compute=\"bfloat16\"\)"):
            loss(compute, asked)


def test_other_shapes_and_evaluation_compute_alike() -> None:
    """Programs that are built later keep the plan's precision."""
    batch = {"ids": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3)}
    torch.manual_seed(0)
    plain = small.NextToken()
    model = parallelize(copy.deepcopy(plain), Plan(Layout((1,), ("dp",)), compute="bfloat16"), batch)
    other = {key: torch.cat([x, x + 1]) for key, x in batch.items()}
    model.eval()
    with computing("bfloat16", "cpu"):
        wanted = plain(**other)["loss"]
    assert torch.equal(model(**other)["loss"], wanted)
    assert not torch.equal(plain(**other)["loss"], wanted)


def test_a_wrong_program_in_bfloat16_does_not_certify(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = families.seeded("llama", 1)
    plan = plan_of("fsdp2 x tp2", "llama", compute="bfloat16")
    assert certify(model, plan, batch).holds()
    assert certify(model, replace(plan, compute=None), batch).holds(None)
    run = virtual.Lockstep.run
    monkeypatch.setattr(
        virtual.Lockstep, "run", lambda self, rows: [[x * 1.05 for x in row] for row in run(self, rows)]
    )
    found = certify(model, plan, batch)
    assert found.replicas_agree and not found.holds()
