"""A global batch as this rank's pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperparallel.graph.capture.batch_tree import flatten
from hyperparallel.graph.program import RankProgram
from hyperparallel.runtime.module.as_dtensor import Cuts, cuts, narrowed


def input_cuts(program: RankProgram) -> dict[str, Cuts]:
    """By path in the batch, where this rank's piece of an input lies in the whole tensor."""
    return {path: cuts(program.input_specs[path], program.rank) for path in program.inputs}


def own_piece(leaf: Tensor, where: Cuts, device: torch.device) -> Tensor:
    """This rank's piece of a tensor that is the same on every rank, on the device of the program.

    leaf: plain (then nothing is sent), or a DTensor, which is brought together. The piece is a view of it
    where it lies on the device already.
    """
    whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    piece = narrowed(whole.detach(), where)
    return piece if piece.device == device else piece.to(device)


def local_leaves(leaves: Sequence[Tensor], where: Iterable[Cuts], device: torch.device) -> list[Tensor]:
    """This rank's pieces of a batch's tensors; `where` by `input_cuts`, in the order of the leaves."""
    return [own_piece(leaf, each, device) for leaf, each in zip(leaves, where, strict=True)]


def signature(leaves: Sequence[Tensor]) -> Any:
    """What a program was built for: shapes and dtypes of the batch, and automatic mixed precision."""
    kinds = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in leaves)
    mixed = {x.device.type for x in leaves}
    return kinds, tuple(torch.get_autocast_dtype(d) for d in sorted(mixed) if torch.is_autocast_enabled(d))


def call_signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`signature` of a call whose nesting and plain Python values may differ from call to call."""
    tree, leaves = flatten((tuple(args), dict(sorted(kwargs.items()))))
    return signature(leaves), tree.outline()
