"""A global batch as this rank's pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperparallel.graph.capture.batch_tree import flatten
from hyperparallel.graph.program import RankProgram
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.as_dtensor import local_piece


def local_inputs(program: RankProgram, leaves: Sequence[Tensor], here: Here) -> dict[str, Tensor]:
    """This rank's pieces of a batch's tensors, by placeholder; no communication for plain tensors."""
    values = {}
    for (path, name), leaf in zip(program.inputs.items(), leaves, strict=True):
        plain = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        piece = local_piece(plain.detach(), program.input_specs[path], here.rank)
        values[name] = piece.to(here.device)
    return values


def signature(leaves: Sequence[Tensor]) -> Any:
    """What a program was built for: shapes and dtypes of the batch, and automatic mixed precision."""
    kinds = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in leaves)
    mixed = {x.device.type for x in leaves}
    return kinds, tuple(torch.get_autocast_dtype(d) for d in sorted(mixed) if torch.is_autocast_enabled(d))


def call_signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`signature` of a call whose nesting and plain Python values may differ from call to call."""
    tree, leaves = flatten((tuple(args), dict(sorted(kwargs.items()))))
    return signature(leaves), tree.outline()
