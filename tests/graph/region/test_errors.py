"""Mistakes in regions: the error names the region, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperparallel as hp
from hyperparallel.errors import CaptureError, LayoutError, UserError
from tests.runtime.module.small import made, numbers

pytestmark = pytest.mark.fake
MESH = hp.Layout((2, 2), ("dp", "tp"))


class Around(nn.Module):
    """A region between two linear layers; it also gets a weight that the region may steal."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 6)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.region(self.first(x)))
        return y.pow(2).sum()


def refused(region: Any, match: str, kind: type[Exception] = UserError, rows: int = 4) -> None:
    with pytest.raises(kind, match=match):
        hp.derive(made(Around, region), hp.Plan(MESH), numbers(rows, 4))


def region(code: Callable[..., Any], ins: Any = ("dp", "tp"), outs: Any = ("dp", "tp"), **more: Any) -> Any:
    return hp.local_region(code, ins, outs, name="code", **more)


def same(x: Tensor) -> Tensor:
    return x * 2


def branching(x: Tensor) -> Tensor:
    return hp.all_reduce(x, "tp") if hp.axis_index("tp") == 0 else x


def crossed(x: Tensor) -> Tensor:
    first, second = ("tp", "dp") if hp.axis_index("tp") == 0 else ("dp", "tp")
    return hp.all_reduce(hp.all_reduce(x, first), second)


LAYOUTS = {
    "rank": (region(same, ins=("dp",)), r"argument 0 of code.*2 entries"),
    "rank of a result": (region(same, outs=("dp", "tp", None)), r"result 0 of code.*2 entries"),
    "axis": (region(same, ins=("dp", "tq")), r"argument 0 of code.*'tq'.*dp, tp.*write tp"),
    "axis of a result": (region(same, outs=("dq", None)), r"result 0 of code.*'dq'.*write dp"),
    "twice": (region(same, ins=("dp", "dp")), r"each axis once"),
    "another mesh": (region(same, ins=hp.Layout((4,), ("dp",))("dp", None), outs=None), "plan's mesh"),
    "pending argument": (region(same, ins=("dp", None, {"tp": "sum"})), "nothing pending"),
    "too many layouts": (region(same, ins=[("dp", "tp"), None]), "in_layouts of code.*1, one a tensor"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_that_do_not_fit(case: str) -> None:
    refused(*LAYOUTS[case], kind=LayoutError)


RESULTS = {
    "number": (region(lambda x: (x, x)), r"results of code: got \['Tensor', 'Tensor'\].*1 tensors"),
    "kind": (region(lambda x: x.shape[0]), r"results of code.*int"),
    "nothing": (region(lambda x: None), r"results of code.*NoneType"),
    "too large": (
        region(lambda x: hp.all_gather(x, "tp", 1)[:, : 3 + hp.axis_index("tp")]),
        "dim 1 of 7 cut by tp",
    ),
    "not whole": (region(lambda x: x[: 1 + hp.axis_index("dp")], outs=(None, "tp")), "cut by no axis"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESULTS)
def test_results_that_do_not_fit(case: str) -> None:
    refused(*RESULTS[case])


CODE = {
    "branch": (region(branching), "rank 0 calls all_reduce.*while rank 1 returns.*branches on axis_index"),
    "order": (region(crossed), "rank 0 calls all_reduce.*while rank 1 calls all_reduce"),
    "random": (region(lambda x: x * torch.rand_like(x)), "random op in code.*made outside"),
    "dropout": (region(lambda x: torch.dropout(x, 0.5, True)), "random op in code"),
    "axis of a call": (region(lambda x: hp.all_reduce(x, "tq")), r"axis in code: got 'tq'.*write tp"),
    "op": (region(lambda x: hp.all_reduce(x, "tp", "add")), "op of all_reduce in code: got 'add'"),
    "dim": (region(lambda x: hp.all_gather(x, "tp", 2)), "dim of all_gather in code: got 2"),
    "steps": (region(lambda x: hp.ppermute(x, "tp", 1.5)), "perm of ppermute in code: got 1.5"),  # type: ignore[arg-type]
    "no pairs": (region(lambda x: hp.ppermute(x, "tp", [0, 1])), "perm of ppermute in code"),  # type: ignore[list-item]
    "half a root": (region(lambda x: hp.broadcast(x, "tp", 1.0)), "root of broadcast in code: got 1.0"),  # type: ignore[arg-type]
    "perm": (region(lambda x: hp.ppermute(x, "tp", [(0, 1), (1, 1)])), "perm of ppermute"),
    "root": (region(lambda x: hp.broadcast(x, "tp", 2)), "root of broadcast in code: got 2.*below 2"),
    "other roots": (
        region(lambda x: hp.broadcast(x, "tp", hp.axis_index("tp"))),
        "rank 0 calls broadcast.*while rank 1 calls broadcast",
    ),
    "operand": (region(lambda x: hp.all_reduce(3.0, "tp")), "all_reduce in code: got 'float'"),
    "sizes": (region(lambda x: hp.all_reduce(x[hp.axis_index("tp") :], "tp")), "operand of all_reduce"),
    "maximum": (region(lambda x: hp.all_reduce(x, "tp", "max")), r"gradient through all_reduce.*detach"),
    "pending maximum": (
        region(lambda x: x.amax(0), outs=("tp", {"dp": "max"})),
        "gradient of result 0 of code: got 'pending max'",
    ),
    "nested": (region(lambda x: region(same)(x)), "inside another region"),
}


@pytest.mark.parametrize("case", CODE)
def test_code_that_cannot_be_one_program(case: str) -> None:
    refused(*CODE[case])


def test_tensors_that_are_no_arguments() -> None:
    model = made(Around, None)
    model.region = hp.local_region(lambda x: x @ model.last.weight.T, ("dp", None), ("dp", None), name="code")
    with pytest.raises(UserError, match=r"tensor in code.*\[6, 6\].*one more argument"):
        hp.derive(model, hp.Plan(MESH), numbers(4, 4))


def test_values_read_by_the_code_name_its_line() -> None:
    def reads(x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x

    refused(region(reads), r"in reads: `return x if float\(x.sum\(\)\) > 0", kind=CaptureError)


def test_uneven_pieces_that_the_code_does_not_take() -> None:
    code = region(lambda x: x.unflatten(0, (2, 1)).flatten(0, 1), ins=("dp", None), outs=("dp", None))
    refused(code, r"arguments of code.*dim 0 of argument 0 has size 5: dp=2", rows=5)
    hp.derive(made(Around, code), hp.Plan(MESH), numbers(4, 4))


def test_uneven_pieces_on_a_mesh_too_large_to_rehearse() -> None:
    plan = hp.Plan(hp.Layout((66, 2), ("dp", "tp")))
    with pytest.raises(UserError, match="dim 0 of argument 0 has size 67: dp=66"):
        hp.derive(made(Around, region(same)), plan, numbers(67, 4))
    hp.derive(made(Around, region(same)), plan, numbers(132, 4))


@pytest.mark.parametrize(
    "call",
    [lambda: hp.axis_index("tp"), lambda: hp.axis_size("tp"), lambda: hp.all_reduce(torch.ones(1), "tp")],
)
def test_calls_outside_a_region(call: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match="outside a region"):
        call()


def test_arguments_of_local_region_itself() -> None:
    with pytest.raises(UserError, match="a function of tensors"):
        hp.local_region(3, None, None)
    with pytest.raises(LayoutError, match=r"in_layouts.*a list of layouts"):
        hp.local_region(same, "dp", None)
    host = hp.Mesh((1,), ("tp",))(None, tier="host")
    for ins, outs, field in ((host, None, r"in_layouts\[0\]"), ([None], [None, host], r"out_layouts\[1\]")):
        with pytest.raises(LayoutError, match=rf"^{field}\.tier: got 'host'; allowed: 'device'"):
            hp.local_region(same, ins, outs)
    with pytest.raises(UserError, match="tensors by position"):
        region(same)(x=torch.ones(2, 2))
    with pytest.raises(LayoutError, match="2, one a tensor"):
        region(lambda x, y: x)(torch.ones(2, 2), torch.ones(2, 2))
