"""Every field of a `Plan` changes the program that is run, through both front doors, or is refused.

A new field without an entry in `CHANGES` fails here by its name.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperparallel.errors import PlanError
from hyperparallel.graph.build import Built, build
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.plan.decide import pinned
from hyperparallel.runtime.module.parallel import parallelize

pytestmark = pytest.mark.fake
MESH = Layout((2, 2), ("dp", "tp"))
SWAPPED = Layout((2, 2), ("dp", "tp"), ranks=(0, 2, 1, 3))
UP = {"up.weight": MESH("tp", None)}
CUT = {"norm": MESH("dp", "tp", None)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.norm(x + self.down(F.silu(self.up(x))) * x).pow(2).mean()}


DOORS = {
    "parallelize": {"whole_outputs": True, "joint": False},
    "TrainStep": {"loss": "loss", "joint": True},
    "TrainStep with accumulation": {"loss": "loss", "joint": True, "micro_batches": 2},
}
CHANGES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "mesh": (Plan(MESH), {"mesh": SWAPPED}),
    "params": (Plan(MESH), {"params": UP}),
    "inputs": (Plan(MESH), {"inputs": {"x": MESH(None, ("dp", "tp"), None)}}),
    "activations": (Plan(MESH, UP), {"activations": CUT}),
    "fsdp": (Plan(MESH), {"fsdp": "dp"}),
    "zero": (Plan(MESH, fsdp="dp"), {"zero": 2}),
    "batch": (Plan(MESH), {"batch": ("dp", "tp")}),
    "exact": (Plan(MESH), {"exact": True}),
    "in_flight_bytes": (Plan(MESH, fsdp="dp"), {"in_flight_bytes": 1 << 20}),
    "compute": (Plan(MESH), {"compute": "bfloat16"}),
    "reduce": (Plan(MESH, UP, compute="bfloat16"), {"reduce": "bfloat16"}),
}
"""By field: a plan, and another value of the field that must change its program."""


def built(plan: Plan, rows: int = 4, later: bool = False, **how: Any) -> Built:
    torch.manual_seed(0)
    return build(Small(), plan, (), {"x": torch.ones(rows, 6, 8)}, later=later, **how)


def program(plan: Plan, joint: bool, **how: Any) -> Any:
    """What one rank runs: its ops with their arguments, what moves between which ranks, what is stored."""
    made = built(plan, **how)
    one = made.rank_program(1, defer="micro_batches" in how, joint=joint)
    ops = [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in one.graph.nodes]
    moves = [(t.kind, made.decisions.mesh.group(1, t.axes), t.num_bytes, t.dtype) for t in one.transfers()]
    stored = {name: spec.layout().dims for name, spec in made.decisions.stored.items()}
    return ops, moves, stored


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", [one.name for one in fields(Plan)])
def test_every_field_changes_the_program(name: str, door: str) -> None:
    assert name in CHANGES, f"Plan.{name} has no entry here that shows what it changes"
    plan, change = CHANGES[name]
    assert set(change) == {name}
    how = DOORS[door]
    assert program(plan, **how) == program(plan, **how), "equal plans make equal programs"
    assert program(plan, **how) != program(replace(plan, **change), **how)


def test_zero_1_changes_what_is_accumulated_and_is_refused_elsewhere() -> None:
    two, one = Plan(MESH, fsdp="dp", zero=2), Plan(MESH, fsdp="dp", zero=1)
    accumulated = DOORS["TrainStep with accumulation"]
    assert program(two, **accumulated) != program(one, **accumulated)
    with pytest.raises(PlanError, match=r"^zero: got 1; allowed: 2 or 3"):
        parallelize(Small(), Plan(Layout((1,), ("dp",)), fsdp="dp", zero=1), {"x": torch.ones(4, 6, 8)})


@pytest.mark.parametrize("rows", [4, 8])
def test_a_later_program_keeps_to_what_was_declared(rows: int) -> None:
    """Another batch shape is cut as the first: along the sequence after the norm."""
    first = built(Plan(MESH, UP, activations=CUT), whole_outputs=True)
    later = built(pinned(first.decisions), rows, True, whole_outputs=True)

    def after_norm(made: Built) -> Any:
        ops = [op for op in made.workload.ops if op.module == "norm" and not op.backward]
        return made.decisions.operands[ops[-1].name][1][0].layout().dims

    assert after_norm(later) == after_norm(first) == (("dp",), ("tp",), ())


def test_a_later_program_need_not_run_everything() -> None:
    plan = Plan(MESH, inputs={"mask": MESH("dp", None)}, activations={"other": MESH("dp", None)})
    assert built(plan, later=True).decisions
    with pytest.raises(PlanError, match="mask"):
        built(plan)
