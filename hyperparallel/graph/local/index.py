"""Local forms of lookups in a cut table, and of accumulating writes.

Indices are global. A lookup reads 0 where an index falls outside this rank's rows, which makes a
pending sum; a write drops what falls outside. `padding_idx` is a global row number as well. Where
the *indices* are cut, the tensor that is written to joins the pending sum on the first piece only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperparallel.graph.local.local_op import LocalOp, only_if

aten = torch.ops.aten
Form = Callable[[LocalOp], tuple[Any, ...]]


def _within(index: torch.Tensor, offset: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers within the piece (0 where outside), and which are outside."""
    here = index - offset
    outside = (here < 0) | (here >= size)
    return here.masked_fill(outside, 0), outside


def embedding_piece(table: torch.Tensor, index: torch.Tensor, offset: int) -> torch.Tensor:
    """Rows of a table of which this rank holds those from `offset` on; 0 for the others."""
    # A kernel may not look up row 0 of an empty piece.
    if table.shape[0] == 0:
        return table.new_zeros((*index.shape, table.shape[1]))
    rows, outside = _within(index, offset, table.shape[0])
    # Without padding_idx, which changes gradients only; those have a form of their own.
    found: torch.Tensor = aten.embedding.default(table, rows)
    return found.masked_fill_(outside.unsqueeze(-1), 0)


def embedding_grad_piece(
    grad: torch.Tensor,
    index: torch.Tensor,
    rows: int,
    padding: int,
    by_frequency: bool,
    offset: int,
) -> torch.Tensor:
    """The gradient of this rank's `rows` rows of the table.

    Rows of others and the padding row go to one more row, which ATen is told to skip.
    """
    here = index - offset
    # Rows of the padding index have no gradient on any rank; the number is global.
    skipped = (here < 0) | (here >= rows) | (index == padding)
    here = here.masked_fill(skipped, rows)
    grads: torch.Tensor = aten.embedding_dense_backward.default(
        grad, here, rows + 1, rows, by_frequency
    )
    return grads[:rows]


def gather_piece(table: torch.Tensor, dim: int, index: torch.Tensor, offset: int) -> torch.Tensor:
    """gather along a cut dim: 0 where an index falls outside."""
    if table.shape[dim] == 0:
        return table.new_zeros(index.shape)
    rows, outside = _within(index, offset, table.shape[dim])
    return table.gather(dim, rows).masked_fill_(outside, 0)


def select_piece(table: torch.Tensor, dim: int, index: torch.Tensor, offset: int) -> torch.Tensor:
    """index_select along a cut dim: 0 where an index falls outside."""
    if table.shape[dim] == 0:
        shape = list(table.shape)
        shape[dim] = index.numel()
        return table.new_zeros(shape)
    rows, outside = _within(index.reshape(-1), offset, table.shape[dim])
    shape = [1] * table.ndim
    shape[dim] = -1
    return table.index_select(dim, rows).masked_fill_(outside.reshape(shape), 0)


def scatter_add_piece(
    table: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, offset: int
) -> torch.Tensor:
    """scatter_add along a cut dim: what falls outside is dropped."""
    if table.shape[dim] == 0:
        return table.clone()
    rows, outside = _within(index, offset, table.shape[dim])
    # What falls outside is added to row 0 as zeros.
    return table.scatter_add(dim, rows, source.masked_fill(outside, 0))


def index_add_piece(
    table: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    alpha: float,
    offset: int,
) -> torch.Tensor:
    """index_add along a cut dim: what falls outside is dropped."""
    if table.shape[dim] == 0:
        return table.clone()
    rows, outside = _within(index.reshape(-1), offset, table.shape[dim])
    shape = [1] * table.ndim
    shape[dim] = -1
    kept = source.masked_fill(outside.reshape(shape), 0)
    return table.index_add(dim, rows, kept, alpha=alpha)


def _embedding(local: LocalOp) -> tuple[Any, ...]:
    if "v" not in local.pieces:
        return local.call()
    return (local.emit(embedding_piece, *local.args[:2], local.offset("v")),)


def _embedding_backward(local: LocalOp) -> tuple[Any, ...]:
    if "v" not in local.pieces:
        return local.call()
    grad, index, _, padding, by_frequency = local.args
    rows, offset = local.size("v"), local.offset("v")
    return (local.emit(embedding_grad_piece, grad, index, rows, padding, by_frequency, offset),)


def _lookup(piece: Callable[..., torch.Tensor]) -> Form:
    """gather, index_select: (self, dim, index)"""

    def form(local: LocalOp) -> tuple[Any, ...]:
        if "v" not in local.pieces:
            return local.call()
        table, dim, index = local.args[:3]
        return (local.emit(piece, table, dim, index, local.offset("v")),)

    return form


def _scatter_add(local: LocalOp) -> tuple[Any, ...]:
    table, dim, index, source = local.args
    table = _once(local, table)
    if "v" not in local.pieces:
        return local.call((table, dim, index, source))
    return (local.emit(scatter_add_piece, table, dim, index, source, local.offset("v")),)


def _index_add(local: LocalOp) -> tuple[Any, ...]:
    table, dim, index, source = local.args
    table = _once(local, table)
    if "v" not in local.pieces:
        return local.call((table, dim, index, source))
    alpha = local.kwargs.get("alpha", 1)
    offset = local.offset("v")
    return (local.emit(index_add_piece, table, dim, index, source, alpha, offset),)


def _index_put(local: LocalOp) -> tuple[Any, ...]:
    table = _once(local, local.args[0])
    return local.call((table, *local.args[1:]))


def _once(local: LocalOp, table: Any) -> Any:
    # A cut index leaves a pending sum: of n ranks that all added the table, the sum would have it n times.
    lost = local.lost()
    return local.emit(only_if, table, local.first(lost)) if lost else table


FORMS: dict[str, Form] = {
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _lookup(gather_piece),
    "aten.index_select": _lookup(select_piece),
    "aten.scatter_add": _scatter_add,
    "aten.index_add": _index_add,
    "aten.index_put": _index_put,
    "aten._unsafe_index_put": _index_put,
    "aten._index_put_impl": _index_put,
}
