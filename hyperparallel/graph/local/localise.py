"""The local form of an op: what one rank calls, given its pieces of the cut factors.

For most ops it is the same call on local tensors. Shapes in the arguments (view, expand, full,
slice_backward) become local ones. What else differs stands in one table of functions, by kind, in
the files beside this one: factories with an offset, lookups in a cut table, softmax and cross-entropy
over a cut dim, biases that are added once, random numbers drawn for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from hyperparallel.errors import UserError, Words
from hyperparallel.graph.local import fragile, index, loss, matmul, random, reduction, softmax, view
from hyperparallel.graph.local.local_op import LocalOp
from hyperparallel.shard.own_rule import check_target

LocalForm = Callable[[LocalOp], tuple[Any, ...]]

_FAMILIES = (view, matmul, reduction, softmax, loss, index, random, fragile)
_TABLE: dict[str, LocalForm] = {name: form for family in _FAMILIES for name, form in family.FORMS.items()}


def localise(local: LocalOp) -> tuple[Any, ...]:
    """Emit the local form of an op; one local result per entry of `op.outputs` (None if unused)."""
    form = _find(local.op.target)
    return local.call() if form is None else form(local)


def register_local_form(target: str, form: LocalForm) -> None:
    """Give an op of your own a local form, where calling it on local tensors is not right.

    target: the op's name, as of `register_rule`. form: gets a `LocalOp` and returns one value per result.
    Raises `UserError` for what is no name or no function and, when an op is made local, for other results.

    >>> def ramp(local):  # mylib.ramp(x, start): rows count from the first of the whole tensor
    ...     return local.call(local.with_argument(1, local.argument(1) + local.offset("s")))
    >>> register_local_form("mylib.ramp", ramp)
    """
    check_target(target)
    if not callable(form):
        raise UserError(f"local form of {target}", form, "a function of a LocalOp")
    _TABLE[target] = _checked(target, form)


def _checked(target: str, form: LocalForm) -> LocalForm:
    """The user's `form`; what goes wrong in it is said with the op's name."""
    about = f"local form of {target}"

    def call(local: LocalOp) -> tuple[Any, ...]:
        try:
            results = form(local)
        except UserError:
            raise
        except Exception as error:
            said = Words(f"{type(error).__name__}: {error}")
            raise UserError(about, said, "a function that emits calls of its LocalOp") from error
        names = local.op.outputs
        # A program being written consists of nodes; a tensor in it would be one of this process.
        kind: Any = fx.Node if any(isinstance(x, fx.Node) for x in local.args) else (fx.Node, Tensor)
        good = isinstance(results, (tuple, list)) and len(results) == len(names)
        if not good or any(n and not isinstance(x, kind) for n, x in zip(names, results, strict=True)):
            wanted = f"a tuple of {len(names)}, each returned by local.emit, as local.call() returns one"
            raise UserError(about, Words(type(results).__name__ + f" {results!r}"), wanted)
        return tuple(results)

    return call


def _find(target: str) -> LocalForm | None:
    form = _TABLE.get(target)
    if form is None:
        # An overload first, then the op, then the op that an in-place one is the twin of.
        base = target.rpartition(".")[0]
        form = _TABLE.get(base) or _TABLE.get(base.removesuffix("_"))
    return form


__all__ = ["LocalForm", "LocalOp", "localise", "register_local_form"]
