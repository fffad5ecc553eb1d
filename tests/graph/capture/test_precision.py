"""Mixed precision in captured graphs: equal to torch.autocast, delicate functions, written-out casts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperparallel.errors import PlanError
from hyperparallel.graph.capture.capture import capture
from hyperparallel.graph.capture.precision import computing
from hyperparallel.graph.joint.promote import SUM_OPS
from tests.graph.capture import families
from tests.graph.capture.joint import run_eager, run_graph

pytestmark = pytest.mark.fake
aten = torch.ops.aten


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma"])
def test_a_program_in_bfloat16_is_the_module_under_autocast(family: str) -> None:
    """Bit for bit, PyTorch's own autocast being the oracle: these models widen norms and softmax themselves.

    Attention is spelled out, since the fused one repeats heads in another way when it is traced.
    """
    model, batch = families.seeded(family, 2, attn_implementation="eager")
    captured = capture(model, (), batch, compute="bfloat16")
    found, _ = run_graph(captured, model, (), batch)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**batch)
    wanted = torch.autograd.grad(outputs.loss, list(model.parameters()))
    assert torch.equal(found["output"]["loss"], outputs.loss.detach())
    assert torch.equal(found["output"]["logits"], outputs.logits.detach())
    assert outputs.logits.dtype == torch.bfloat16
    for (name, parameter), grad in zip(model.named_parameters(), wanted, strict=True):
        assert found["grad"][name].dtype == parameter.dtype == torch.float32
        assert torch.equal(found["grad"][name], grad), name


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
def test_losses_and_norms_are_widened_as_on_one_device(family: str) -> None:
    model, batch = families.seeded(family, 2, attn_implementation="eager")
    captured = capture(model, (), batch, compute="bfloat16")
    found, _ = run_graph(captured, model, (), batch)
    with computing("bfloat16", "cpu"):
        wanted = run_eager(captured, model, (), batch)
    for role, values in wanted.items():
        for name, value in values.items():
            assert torch.equal(found[role][name], value), f"{role} {name}"
    norms = captured.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    assert norms and all(n.all_input_nodes[0].meta["val"].dtype == torch.float32 for n in norms)
    loss = captured.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    assert loss and all(n.meta["val"].dtype == torch.float32 for n in loss)


X = torch.linspace(-2, 2, 24).view(4, 6)
DELICATE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "method": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "module": lambda x: nn.RMSNorm(6)(x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "keyword": lambda x: F.log_softmax(input=x, dim=0),
    "sum": lambda x: x.sum(0),
    "power": lambda x: x**2,
    "norm": lambda x: torch.linalg.norm(x),
}


@pytest.mark.parametrize("name", DELICATE)
def test_delicate_functions_run_in_float32(name: str) -> None:
    x = X.bfloat16()
    with computing("bfloat16", "cpu"):
        got = DELICATE[name](x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, DELICATE[name](x.float()))


def test_without_compute_nothing_changes() -> None:
    with computing(None, "cpu"):
        assert (X @ X.T).dtype == torch.float32
        assert X.bfloat16().softmax(0).dtype == torch.bfloat16


def test_the_other_tracing_route_casts_alike() -> None:
    model, batch = families.seeded("llama", 1)
    rows = [
        run_graph(capture(model, (), batch, compute="bfloat16", strict=s), model, (), batch)
        for s in (False, True)
    ]
    for name, grad in rows[0][0]["grad"].items():
        assert torch.equal(grad, rows[1][0]["grad"][name]), name


class Mixed(nn.Module):
    """Sums of float32 and bfloat16 with each operand first, and with a number held as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).bfloat16())
        self.wide = nn.Parameter(torch.linspace(1, 3, 12).view(3, 4))
        self.number = nn.Parameter(torch.tensor(0.3, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        low = self.low @ x
        return ((self.wide + low) * (low - self.wide) + (low + self.number)).pow(2).sum()


def test_mixed_sums_get_their_casts_written_out() -> None:
    model, x = Mixed(), torch.eye(4).bfloat16()
    captured = capture(model, (x,))
    for node in captured.graph.nodes:
        if node.target in SUM_OPS:
            kinds = {n.meta["val"].dtype for n in node.all_input_nodes if n.meta["val"].dim()}
            assert kinds == {node.meta["val"].dtype}, node.format_node()
    found, _ = run_graph(captured, model, (x,), {})
    wanted = run_eager(captured, model, (x,), {})
    for name, grad in wanted["grad"].items():
        assert torch.equal(found["grad"][name], grad), name
    assert torch.equal(found["output"]["output"], wanted["output"]["output"])


def test_deep_stacks_are_copied_with_their_casts() -> None:
    model, batch = families.seeded("llama", 6)

    def ops(shorten: bool) -> list[str]:
        graph = capture(model, (), batch, compute="bfloat16", shorten=shorten).graph
        return sorted(
            f"{n.target} {n.meta.get('block', ('', 0, ''))[2]}"
            for n in graph.nodes
            if n.op == "call_function"
        )

    assert ops(True) == ops(False)


def test_float64_parameters_are_refused() -> None:
    with pytest.raises(PlanError, match=r"compute: got 'bfloat16'.*weight is float64.*float32 parameters"):
        capture(nn.Linear(2, 2).double(), (torch.ones(1, 2).double(),), compute="bfloat16")
