"""What the parts of a program are called in a timeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.local.loss import nll_sums
from hyperparallel.graph.predict.instructions import kind_of
from hyperparallel.graph.region.segments import Segment
from hyperparallel.runtime.exec.inductor import Stretch

pytestmark = pytest.mark.fake
EMPTY = fx.GraphModule(torch.nn.Module(), fx.Graph())


@pytest.mark.parametrize(
    ("called", "kind"),
    [
        (torch.ops.aten.mm.default, "matmul"),
        (torch.ops.aten.silu_backward.default, "elementwise"),
        (torch.ops.aten.native_dropout.default, "elementwise"),
        (torch.ops.aten.cat.default, "data movement"),
        (communication.pack, "data movement"),
        (nll_sums, "loss"),
        (Segment(("key",), EMPTY, (), ()), "region"),
        (Segment(("key",), EMPTY, (), ()).through(Stretch(EMPTY)), "region"),
        (Stretch(EMPTY), "stretch"),
        (torch.nn.functional.relu, "other"),
    ],
)
def test_kinds(called: Any, kind: str) -> None:
    """A region is a user's code; a stretch is what Inductor compiles as one."""
    assert kind_of(called) == kind
