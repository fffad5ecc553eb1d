"""A parallelized module beside the plain one: what tests of both share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.parallel import parallelize
from tests.ranks import run_ranks
from tests.runtime.module.small import made, numbers

DP2, TP2 = Layout((2,), ("dp",)), Layout((2,), ("tp",))
X = numbers(5, 4)


def on_ranks(n: int, check: Callable[[], Any]) -> list[Any]:
    return run_ranks(n, lambda rank: check())


def pair(cls: type[nn.Module], batch: Any, plan: Plan | None = None, **more: Any) -> Any:
    """The same module parallelized and plain."""
    return parallelize(made(cls), plan or Plan(DP2), batch, **more), made(cls)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_close(got: Tensor, true: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(whole(got), true, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_grads(model: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    got = {name: p.grad for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        found = got.pop(name)
        assert (found is None) == (p.grad is None), name
        if found is not None and p.grad is not None:
            assert_close(found, p.grad, tolerance)
    assert not got


def assert_same_step(model: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Forward and backward of a scalar loss."""
    got, true = model(*args, **kwargs), plain(*args, **kwargs)
    assert_close(got, true)
    got.backward()
    true.backward()
    assert_same_grads(model, plain)
