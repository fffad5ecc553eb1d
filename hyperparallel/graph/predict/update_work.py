"""What an optimizer does with each parameter in a step, counted by letting it update a small one.

Ops are counted as they reach the dispatcher, on the second step (the first makes the moments): so many calls
per parameter, so many reads and writes of a tensor as large as it. Fused and looping optimizers differ here,
though they compute the same.

Leaves out what depends on the parameter's shape (Muon, Shampoo).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode  # private, checked on torch 2.13

from hyperparallel.shard.rules.table import facts_of

NUM_ELEMENTS = 8


class UpdateWork(NamedTuple):
    """Per parameter: (op, accesses) of each call, and how many tensors of its size stay.

    accesses: tensors of the parameter's size that are read or written.
    """

    calls: tuple[tuple[str, int], ...]
    tensors: int


FUSED_ADAM = UpdateWork((("adam", 7),), 4)
"""Parameter and two moments are read and written, the gradient is read."""


def update_work(optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]) -> UpdateWork:
    """Count what an optimizer does; optimizer: makes one from (name, parameter) pairs.

    >>> update_work(lambda named: torch.optim.SGD(named, lr=0.1, foreach=False))
    UpdateWork(calls=(('add_', 3),), tensors=2)
    """
    parameter = nn.Parameter(torch.ones(NUM_ELEMENTS))
    made = optimizer([("parameter", parameter)])
    parameter.grad = torch.ones(NUM_ELEMENTS)
    made.step()
    # The first step has made the moments; from the second on, steps are alike.
    with _Counting() as counted:
        made.step()
    state = pytree.tree_leaves(dict(made.state))
    kept = sum(isinstance(x, Tensor) and x.numel() == NUM_ELEMENTS for x in state)
    return UpdateWork(tuple(counted.calls), 2 + kept)


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name.startswith("_record_function"):  # the profiler's own
            return result
        if not facts_of(str(func)).view and name != "_local_scalar_dense":
            written = [x for x, arg in zip(args, func._schema.arguments, strict=False) if _is_written(arg)]
            # What is written in place counts twice (read and written), a result where there is none.
            values = pytree.tree_leaves((args, kwargs, written or result))
            accesses = sum(isinstance(x, Tensor) and x.numel() == NUM_ELEMENTS for x in values)
            self.calls.append((name, accesses))
        return result
