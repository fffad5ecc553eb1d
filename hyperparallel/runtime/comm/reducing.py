"""Reducing values beside a process group: in types that it knows, and among tensors that are here.

Leaves out what moves them (`process_group.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hyperparallel.graph.collective_table import reduce_in_order
from hyperparallel.runtime.comm.group import Group

REDUCE_OP: Mapping[str, Any] = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
}

_STAND_INS = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""Types that gloo cannot reduce, and the type they are reduced as."""

Finish = Callable[[Tensor], Tensor]


def reducible(flat: Tensor, op: str, group: Group) -> tuple[Tensor, Finish | None]:
    """`flat` in a type that can be reduced, and how the reduced values become the result."""
    if flat.is_complex():
        size = group.size if op == "avg" else 1
        return torch.view_as_real(flat).view(-1), lambda out: torch.view_as_complex(out.view(-1, 2)).div_(
            size
        )
    if op == "avg":
        return flat, lambda out: out.div_(group.size)
    if flat.dtype in _STAND_INS:
        return flat.to(_STAND_INS[flat.dtype]), lambda out: out.to(flat.dtype)
    return flat, None


_STEPS: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduce_into(pieces: Sequence[Tensor], op: str, into: Tensor) -> Tensor:
    """The reduction of two or more tensors, first to last, 16-bit floats in float32.

    into: where it is written; none of the pieces but the first two.
    """
    if pieces[0].dtype in (torch.bfloat16, torch.float16):
        return into.copy_(reduce_in_order(pieces, op))
    step = _STEPS[op]
    step(pieces[0], pieces[1], out=into)
    for piece in pieces[2:]:
        step(into, piece, out=into)
    return into.div_(len(pieces)) if op == "avg" else into


def shaped(finish: Finish | None, shape: Sequence[int]) -> Finish:
    """`finish`, if any, then the values in `shape`."""
    if finish is None:
        return lambda out: out.view(shape)
    return lambda out: finish(out).view(shape)
