"""The words of a region as torch ops: shapes and gradients, no kernels.

While the code of one rank is traced, its collectives stand in the graph as these ops. Each is linear,
and its gradient is its transpose: an all-reduce's is an all-reduce, an all-gather's a reduce-scatter, an
exchange's the exchange back. `number` counts the calls of a region, so that no two are taken for one
because their arguments happen to be equal on one rank.

`region` and `region_backward` stand for a whole region in the graph of the whole model, under the number
that the running capture gave it; `token` ties a backward to its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperparallel.errors import UserError

LIBRARY = torch.library.Library("hyperparallel", "FRAGMENT")
LIBRARY.define("all_reduce(Tensor x, str op, str[] axes, int number) -> Tensor")
LIBRARY.define("all_gather(Tensor x, int dim, int[] sizes, int index, str[] axes, int number) -> Tensor")
LIBRARY.define(
    "reduce_scatter(Tensor x, int dim, int[] sizes, int index, str op, str[] axes, int number) -> Tensor"
)
LIBRARY.define(
    "all_to_all(Tensor x, int split_dim, int[] split_sizes, int concat_dim, int[] concat_sizes, int index,"
    " str[] axes, int number) -> Tensor"
)
LIBRARY.define("permute(Tensor x, int[] sends, int[] recv_shape, str[] axes, int number) -> Tensor")
LIBRARY.define("tie(Tensor x, Tensor[] others) -> Tensor")

ops = torch.ops.hyperparallel


def _meaning(name: str, fake: Any, backward: Any) -> None:
    """What an op makes of shapes, and its gradient from the arguments kept."""
    torch.library.register_fake(f"hyperparallel::{name}", fake, lib=LIBRARY)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shape, ctx.rest = inputs[0].shape, inputs[1:]

    def transposed(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (backward(ctx, grad, *ctx.rest), *(None for _ in ctx.rest))

    torch.library.register_autograd(f"hyperparallel::{name}", transposed, setup_context=keep, lib=LIBRARY)


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _linear(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise UserError(
            f"gradient through {name}", op, "sum or avg", "a detached tensor (x.detach()) as its operand"
        )


def _all_reduce_back(ctx: Any, grad: Tensor, op: str, axes: Sequence[str], number: int) -> Tensor:
    _linear("all_reduce", op)
    made: Tensor = ops.all_reduce(grad, op, axes, ~number)
    return made


def _all_gather_back(
    ctx: Any, grad: Tensor, dim: int, sizes: Sequence[int], index: int, axes: Sequence[str], number: int
) -> Tensor:
    made: Tensor = ops.reduce_scatter(grad, dim, sizes, index, "sum", axes, ~number)
    return made


def _reduce_scatter_back(
    ctx: Any,
    grad: Tensor,
    dim: int,
    sizes: Sequence[int],
    index: int,
    op: str,
    axes: Sequence[str],
    number: int,
) -> Tensor:
    _linear("reduce_scatter", op)
    made: Tensor = ops.all_gather(grad, dim, sizes, index, axes, ~number)
    return made / len(sizes) if op == "avg" else made


def _all_to_all_back(
    ctx: Any,
    grad: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    index: int,
    axes: Sequence[str],
    number: int,
) -> Tensor:
    made: Tensor = ops.all_to_all(
        grad, concat_dim, concat_sizes, split_dim, split_sizes, index, axes, ~number
    )
    return made


def _permute_back(
    ctx: Any, grad: Tensor, sends: Sequence[int], recv_shape: Sequence[int], axes: Sequence[str], number: int
) -> Tensor:
    back = [member for pair in pairs(sends) for member in reversed(pair)]
    made: Tensor = ops.permute(grad, back, list(ctx.shape), axes, ~number)
    return made


def pairs(sends: Sequence[int]) -> list[tuple[int, int]]:
    """(from, to) pairs of members out of the flat list that an op's schema can hold.

    >>> pairs([0, 1, 1, 0])
    [(0, 1), (1, 0)]
    """
    return list(zip(sends[::2], sends[1::2], strict=True))


def _all_to_all_fake(
    x: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    index: int,
    axes: Sequence[str],
    number: int,
) -> Tensor:
    return _resized(_resized(x, split_dim, split_sizes[index]), concat_dim, sum(concat_sizes))


_meaning("all_reduce", lambda x, op, axes, number: x.new_empty(x.shape), _all_reduce_back)
_meaning(
    "all_gather",
    lambda x, dim, sizes, index, axes, number: _resized(x, dim, sum(sizes)),
    _all_gather_back,
)
_meaning(
    "reduce_scatter",
    lambda x, dim, sizes, index, op, axes, number: _resized(x, dim, sizes[index]),
    _reduce_scatter_back,
)
_meaning("all_to_all", _all_to_all_fake, _all_to_all_back)
_meaning("permute", lambda x, sends, recv_shape, axes, number: x.new_empty(list(recv_shape)), _permute_back)


def _keep_tied(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.tied = [(x.shape, x.dtype, x.device) for x in inputs[1]]


def _untie(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Zeros for what was tied in, so that its own backward runs on every rank."""
    return grad, [torch.zeros(shape, dtype=kind, device=where) for shape, kind, where in ctx.tied]


torch.library.register_fake("hyperparallel::tie", lambda x, others: x.new_empty(x.shape), lib=LIBRARY)
torch.library.register_autograd("hyperparallel::tie", _untie, setup_context=_keep_tied, lib=LIBRARY)

COLLECTIVES = {
    getattr(ops, name).default: name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
}
"""Every op that communicates, and its name."""
