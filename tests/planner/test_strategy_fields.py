"""Every field of a `Strategy` changes what the planner expects, and becomes part of a plan or is refused.

A new field without an entry here fails by its name.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from hyperparallel.cli.planning import SEARCHED
from hyperparallel.errors import PlanError
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.planning import plan_job
from hyperparallel.planner.runnable import missing, num_micro_batches, to_plan
from hyperparallel.planner.search.space import Limits
from hyperparallel.planner.search.table import predict
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.presets import load_model
from tests.planner.sample import job
from tests.planner.search.test_search import on_mesh

pytestmark = pytest.mark.pure
FIELDS = [one.name for one in fields(Strategy)]
DENSE, EXPERTS = "qwen3-0.6b", "deepseek-v2-lite"
SPREAD = Strategy(tp=2, dp=4)

CHANGES: dict[str, tuple[str, Strategy, dict[str, Any]]] = {
    "tp": (DENSE, Strategy(dp=8), {"tp": 2, "dp": 4}),
    "cp": (DENSE, Strategy(dp=8), {"cp": 2, "dp": 4}),
    "pp": (DENSE, Strategy(dp=8), {"pp": 2, "dp": 4}),
    "dp": (DENSE, Strategy(tp=8), {"dp": 2, "tp": 4}),
    "ep": (EXPERTS, Strategy(dp=8), {"ep": 4}),
    "etp": (EXPERTS, Strategy(tp=2, dp=4, ep=2), {"etp": 2}),
    "virtual": (DENSE, Strategy(pp=2, dp=4), {"virtual": 2}),
    "microbatch": (DENSE, Strategy(dp=8), {"microbatch": 2}),
    "zero": (DENSE, Strategy(dp=8), {"zero": 3}),
    "sp": (DENSE, SPREAD, {"sp": True}),
    "recompute": (DENSE, Strategy(dp=8), {"recompute": "full"}),
    "schedule": (DENSE, Strategy(pp=2, dp=4), {"schedule": "zb-h1"}),
    "dtype": (DENSE, Strategy(dp=8), {"dtype": "fp8"}),
    "reduce": (DENSE, Strategy(dp=8), {"reduce": "bfloat16"}),
    "offload": (DENSE, Strategy(dp=8), {"offload": 1.0}),
    "flash": (DENSE, Strategy(dp=8), {"flash": False}),
    "overlap": (DENSE, Strategy(dp=8), {"overlap": False}),
    "graph": (DENSE, Strategy(dp=8), {"graph": False}),
    "attention": (DENSE, Strategy(dp=8), {"attention": "open"}),
    "experts": (EXPERTS, Strategy(dp=8), {"experts": "fused"}),
    "dispatcher": (EXPERTS, Strategy(dp=8, ep=8), {"dispatcher": "exchange"}),
    "overlap_experts": (EXPERTS, Strategy(dp=8, ep=8, microbatch=1), {"overlap_experts": False}),
    "order": ("mesh", Strategy(tp=2, pp=2, dp=2), {"order": "tp-cp-pp-dp"}),
    "fill": ("mesh", Strategy(tp=4, dp=2), {"fill": "square"}),
    "fused_loss": (DENSE, Strategy(dp=8), {"fused_loss": False}),
    "parts": (DENSE, Strategy(dp=8), {"parts": ("norms",)}),
    "reentrant": (DENSE, Strategy(dp=8, recompute="full"), {"reentrant": True}),
}
"""By field: a model on 8 devices, a strategy, and the change that must change what is expected of it."""

REFUSED = {
    **{"cp": "context parallelism", "pp": "pipeline parallelism", "ep": "expert parallelism"},
    **{"etp": "expert parallelism", "virtual": "pipeline parallelism", "schedule": "pipeline parallelism"},
    **{"recompute": "recomputation", "parts": "recomputation", "offload": "offload"},
    **{"fill": "axes placed square", "dtype": "fp8 products"},
}
ASSUMED = (
    *("flash", "overlap", "graph", "attention", "experts", "dispatcher", "overlap_experts"),
    *("fused_loss", "reentrant"),
)
IN_PLAN = ("tp", "dp", "zero", "sp", "dtype", "reduce")


def expected(name: str, strategy: Strategy) -> Any:
    one = on_mesh(DENSE, (4, 2)) if name == "mesh" else job(name)
    found = predict(one, [strategy], Constants())[0]
    return found.seconds, found.parts, found.memory, found.host_bytes


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_what_is_expected(name: str) -> None:
    assert name in CHANGES, f"Strategy.{name} has no entry here that shows what it changes"
    model, before, change = CHANGES[name]
    assert name in change
    assert expected(model, before) == expected(model, before)
    assert expected(model, before) != expected(model, replace(before, **change))


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_becomes_part_of_a_plan_or_is_refused(name: str) -> None:
    model, (_, before, change) = load_model("llama3.1-8b"), CHANGES[name]
    after = replace(before, **change)
    if name in REFUSED or name in ASSUMED:
        words = REFUSED.get(name) or f"a choice of {name}={getattr(after, name)}"
        assert words in missing(after)
        with pytest.raises(PlanError, match=words):
            to_plan(model, after)
        return
    if name == "microbatch":
        assert num_micro_batches(before, 32) == 4 and num_micro_batches(after, 32) == 2
    elif name == "order":  # data and tensor axes lie alike in all orders
        assert to_plan(model, SPREAD) == to_plan(model, replace(SPREAD, **change))
    else:
        assert name in IN_PLAN, f"Strategy.{name} is neither part of a plan nor refused"
        assert to_plan(model, before) != to_plan(model, after)


def test_number_formats_and_zero_0_of_a_plan() -> None:
    model = load_model("llama3.1-8b")
    assert to_plan(model, Strategy(dp=2, dtype="fp32")).compute is None
    assert to_plan(model, Strategy(dp=2)).compute == "bfloat16"
    whole = to_plan(model, Strategy(dp=2, zero=0))
    assert whole.fsdp is None and whole.batch_axes == ("dp",), "stage 0 keeps all states whole"
    assert [to_plan(model, Strategy(dp=2, zero=zero)).zero for zero in (1, 2, 3)] == [1, 2, 3]


FIXED = {
    **{"tp": 4, "cp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 2, "microbatch": 2, "virtual": 2},
    **{"schedule": "zb-h1", "zero": 3, "sp": True, "recompute": "full", "offload": 1.0},
    "order": "tp-cp-pp-dp",
}


@pytest.mark.parametrize("name", SEARCHED)
def test_what_is_fixed_is_so_in_every_plan_that_is_shown(name: str) -> None:
    assert name in FIXED, f"--fix {name} has no entry here"
    fixed: dict[str, Any] = {name: FIXED[name]} | ({"tp": 2} if name == "etp" else {})
    planning = plan_job(job(EXPERTS, batch=16), limits=Limits(False, tuple(fixed.items())))
    for choice in planning.choices:
        assert getattr(choice.prediction.strategy, name) == FIXED[name], choice.words


def test_sequence_and_zero_stay_as_fixed_where_they_cut_nothing() -> None:
    planning = plan_job(job(DENSE, devices=1), limits=Limits(False, (("sp", True), ("zero", 3))))
    assert all(c.prediction.strategy.sp and c.prediction.strategy.zero == 3 for c in planning.choices)
    with pytest.raises(PlanError):
        plan_job(job(DENSE, devices=1), limits=Limits(False, (("virtual", 2),)))
