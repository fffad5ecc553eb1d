"""Every op that the model families produce has a rule, proved at the shapes they use it with."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import fx

from hyperparallel.graph.capture.capture import capture
from hyperparallel.graph.capture.extract import extract
from hyperparallel.shard.rules.notation import write
from hyperparallel.shard.rules.table import rule_for
from hyperparallel.workload import Op, Workload
from tests.graph.capture.families import FAMILIES, seeded
from tests.graph.local.test_localise import free
from tests.graph.local.virtual_op import OpRun

pytestmark = pytest.mark.fake
DROPOUT = [
    ("gpt2", {"dropout": 0.1}),
    ("bert", {"dropout": 0.1}),
    ("llama", {"attention_dropout": 0.1}),
]


def made_up(value: Any, generator: torch.Generator) -> Any:
    """A real tensor like a fake one; floats in double precision, integers that serve as indices."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = tuple(int(n) for n in value.shape)
    if value.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    return torch.randint(0, 2, shape, generator=generator).to(value.dtype)


def doubled(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def described(op: Op, work: Workload) -> tuple[Any, ...]:
    """What makes two ops the same but for the names of their values."""
    shapes = tuple((work.values[n].shape, work.values[n].dtype) for n in op.inputs)
    plain = [a for a in op.args if isinstance(a, (int, float, bool, str, type(None)))]
    return op.target, shapes, tuple(plain), repr(sorted(op.kwargs))


def prove(node: fx.Node, generator: torch.Generator) -> int:
    """Cut each free factor of one op in two; the number of factors cut."""
    args, kwargs = fx.node.map_aggregate(
        (node.args, node.kwargs),
        lambda a: made_up(a.meta["val"], generator) if isinstance(a, fx.Node) else doubled(a),
    )
    run = OpRun(node.target, args, kwargs)  # type: ignore[arg-type]
    rule = rule_for(run.op, run.values)
    assert rule is not None
    for factor in free(rule):
        for got, want in zip(run.cut(rule, {factor: 2}), run.results, strict=True):
            if got is not None and isinstance(want, torch.Tensor):
                rough = 1e-6 if want.dtype == torch.float32 else 1e-10
                torch.testing.assert_close(
                    got,
                    want,
                    rtol=rough,
                    atol=rough,
                    equal_nan=True,
                    msg=lambda m: f"{run.op.target} {write(rule)}, {factor} cut: {m}",  # noqa: B023
                )
    return len(free(rule))


@pytest.mark.parametrize(
    ("family", "more"),
    [*((name, {}) for name in FAMILIES), *DROPOUT],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain",
)
def test_every_op_of_a_family(family: str, more: dict[str, float]) -> None:
    module, batch = seeded(family, 1, **more)
    captured = capture(module, (), batch)
    work = extract(captured)
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[Any, ...]] = set()
    cut = 0
    for op in work.ops:
        rule = rule_for(op, work.values)
        assert rule is not None, f"{op.target} has no rule"
        for names, operands in ((op.inputs, rule.inputs), (op.outputs, rule.outputs)):
            assert len(names) == len(operands)
            for name, dims in zip(names, operands, strict=True):
                if name is not None and dims is not None:
                    shape = tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims)
                    assert shape == work.values[name].shape, (op.target, write(rule))
        key = described(op, work)
        if key not in seen and nodes[op.name].target is not operator.getitem:
            seen.add(key)
            cut += prove(nodes[op.name], generator)
    assert cut > len(seen)
