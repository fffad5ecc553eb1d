"""What capture keeps of a module: names, ties, frozen parts, buffer updates, nesting, its state."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from hyperparallel.errors import CaptureError, UserError
from hyperparallel.graph.build import captured_model
from hyperparallel.graph.capture.capture import capture, keep_outputs
from hyperparallel.graph.capture.extract import module_of
from hyperparallel.graph.capture.repeat_blocks import is_backward
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from tests.graph.capture.joint import assert_equal_to_eager

pytestmark = pytest.mark.fake

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    extra: Any = None


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    nothing: Any
    parts: Any


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: Batch, scale: float, *, also: Any = None) -> Result:
        y = self.linear(batch.x) * scale + batch.extra["b"][0]
        return Result(y, None, {"pair": Pair(y.sum(), y.argmax(-1)), "also": [also, scale]})


def test_nested_batches_and_results() -> None:
    torch.manual_seed(0)
    module = Nested()
    batch = Batch(torch.randn(2, 3), {"b": [torch.randn(3), None]})
    captured = capture(module, (batch, 2.0), {"also": torch.ones(1)})
    assert list(captured.inputs) == ["batch.x", "batch.extra.b.0", "also"]
    assert list(captured.outputs) == ["y", "parts.pair.left", "parts.pair.right", "parts.also.0"]
    assert list(captured.tangents) == ["y", "parts.pair.left"]
    result = assert_equal_to_eager(captured, module, (batch, 2.0), {"also": torch.ones(1)})
    assert isinstance(result, Result) and result.nothing is None
    assert isinstance(result.parts["pair"], Pair) and result.parts["also"][1] == 2.0


def test_a_batch_is_matched_by_name_and_checked() -> None:
    module = Nested()
    batch = Batch(torch.randn(2, 3), {"b": [torch.randn(3), None]})
    captured = capture(module, (batch, 2.0))
    by_name = captured.flatten_inputs((), {"scale": 2.0, "batch": batch, "also": None})
    assert [x is y for x, y in zip(by_name, (batch.x, batch.extra["b"][0]), strict=True)]
    with pytest.raises(UserError, match=r"scale is 3\.0 but was 2\.0"):
        captured.flatten_inputs((batch, 3.0))
    with pytest.raises(UserError, match="batch"):
        captured.flatten_inputs((), {"scale": 2.0})


@pytest.mark.parametrize("result", ["tensor", "tuple", "view", "input", "twice", "parameter"])
def test_shapes_of_results(result: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x).tanh()
            return {
                "tensor": y,
                "tuple": (y, y.sum()),
                "view": (y, y.view(-1)[1:], y.t()),
                "input": (x, y),
                "twice": (y, y),
                "parameter": (self.linear.weight, y),
            }[result]

    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 4)
    captured = capture(net, (x,))
    assert_equal_to_eager(captured, net, (x,))
    if result == "tensor":
        assert list(captured.outputs) == ["output"] and list(captured.inputs) == ["x"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.arange(4), persistent=False)
        self.register_buffer("same", self.shift)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * self.scale + self.shift)


def test_ties_scalars_and_buffers_that_are_not_saved() -> None:
    torch.manual_seed(0)
    net, ids = Tied(), torch.tensor([1, 2, 2])
    captured = capture(net, (ids,))
    assert list(captured.params) == [n for n, _ in net.named_parameters()]
    assert captured.param_aliases == {"head.weight": "embed.weight"}
    assert list(captured.buffers) == ["shift"] and captured.buffer_aliases == {"same": "shift"}
    assert set(captured.grads) == {"embed.weight", "scale"}  # nothing depends on `unused`
    assert_equal_to_eager(captured, net, (ids,))


def test_frozen_parameters_have_no_gradient() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    net[2].weight.requires_grad_(False)
    captured = capture(net, (torch.randn(3, 4),))
    assert set(captured.grads) == {"2.bias", "4.weight", "4.bias"}
    assert_equal_to_eager(captured, net, (torch.randn(3, 4),))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moving = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1  # bound anew, not written in place
        return self.frozen(self.moving(x)) * 2


def test_buffer_updates_are_results() -> None:
    torch.manual_seed(0)
    net, x = Norms().double(), torch.randn(6, 4, dtype=torch.float64)
    before = {name: b.clone() for name, b in net.named_buffers()}
    captured = capture(net, (x,))
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    assert set(captured.mutations) == {
        "calls",
        "moving.running_mean",
        "moving.running_var",
        "moving.num_batches_tracked",
    }
    assert_equal_to_eager(captured, net, (x,), tolerance=1e-12)


def test_inputs_that_require_gradients() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    captured = capture(net, (x,))
    assert list(captured.input_grads) == ["input"]


def test_gradients_from_chosen_outputs() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = super().forward(x)
            return {"y": y, "loss": y.sum()}

    net, x = Net(3, 2), torch.randn(4, 3)
    assert list(capture(net, (x,)).tangents) == ["loss"]
    assert list(capture(net, (x,), grad_outputs=("y",)).tangents) == ["y"]
    captured = capture(net, (x,))
    keep_outputs(captured, ("loss",))
    assert list(captured.outputs) == ["loss"] and list(captured.grads) == ["weight", "bias"]
    with pytest.raises(CaptureError, match="one of loss"):
        keep_outputs(captured, ("z",))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.linear(x)
        return self.last.sum()


@pytest.mark.parametrize("train", [True, False])
def test_every_node_tells_its_module(train: bool) -> None:
    """Also where nothing is differentiated: layouts of activations and parts go by these names."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    captured = capture(module, (torch.ones(2, 3),), train=train)
    forward = [n for n in captured.graph.nodes if n.op == "call_function" and not is_backward(n)]
    assert [module_of(n) for n in forward if "addmm" in n.name or n.name == "native_layer_norm"] == [
        "0", "1.0", "1.1",
    ]  # fmt: skip


def test_the_module_is_not_touched() -> None:
    net = Remembers().eval()
    before = [id(p) for p in net.parameters()]
    capture(net, (torch.randn(2, 3),))
    assert net.last is None and not net.training
    assert [id(p) for p in net.parameters()] == before
    assert not net.linear._forward_hooks and all(p.grad is None for p in net.parameters())


class ReadsValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class DynamicShape(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class WrongShapes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(5, 5)


class UsesNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class ListsValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([v * 2 for v in x[0].tolist()])


def test_the_strict_route_takes_over() -> None:
    """Direct tracing cannot leave torch for numpy; Dynamo can read such code."""
    net, x = UsesNumpy(), torch.randn(3, 4)
    with pytest.raises(CaptureError, match="leaves torch for numpy"):
        capture(net, (x,), strict=False)
    assert_equal_to_eager(capture(net, (x,)), net, (x,))


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        (ReadsValues(), "if x.sum() > 0:", "reads a tensor's value"),
        (DynamicShape(), "return x[x > 0].sum()", "shape depends on values"),
        (WrongShapes(), "return x @ torch.ones(5, 5)", "same reduction dim"),
        (ListsValues(), "return torch.tensor([v * 2 for v in x[0].tolist()])", "reads a tensor"),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_an_error_names_the_line_that_stopped_it(module: nn.Module, source: str, reason: str) -> None:
    lines, start = inspect.getsourcelines(type(module))
    line = next(start + i for i, text in enumerate(lines) if source in text)
    with pytest.raises(CaptureError) as caught:
        capture(module, (torch.randn(3, 4),))
    message = str(caught.value)
    assert f'file "{__file__}", line {line}' in message and source in message
    assert reason in message


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="missing a required argument"):
        capture(nn.Linear(3, 2))


def test_no_warning_escapes() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(Remembers(), (torch.randn(2, 3),), strict=True)
    assert not caught


def test_a_loss_beside_gradient_roots_is_refused() -> None:
    """One of them would not be looked at."""
    plan = Plan(Mesh((1,), ("dp",)))
    with pytest.raises(UserError, match="None where a loss is named"):
        captured_model(nn.Linear(3, 3), plan, (torch.zeros(2, 3),), loss="output", grad_outputs=["output"])
