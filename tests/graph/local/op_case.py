"""One call whose rule is proved, and the made-up operands that cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """One call. exact: results must agree to the last bit."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    exact: bool = False


def r(*shape: int) -> torch.Tensor:
    """Random numbers, different for every shape but the same in every run."""
    seed = 1 + sum((i + 3) * n for i, n in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def ints(high: int, *shape: int) -> torch.Tensor:
    """Random integers below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(5))


def bools(*shape: int) -> torch.Tensor:
    """Random truth values, about half of them true."""
    return r(*shape) > 0


def case(target: Any, *args: Any, label: str = "", exact: bool = False, **kwargs: Any) -> Case:
    """A case named after its op."""
    name = str(target).removeprefix("aten.").removesuffix(".default")
    return Case(f"{name}-{label}" if label else name, target, args, kwargs, exact)
