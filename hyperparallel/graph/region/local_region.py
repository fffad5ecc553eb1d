"""`local_region`: the user's own per-rank code inside a sharded program.

A function of tensors says in which layouts it takes and gives them; inside, it sees this rank's pieces
and communicates by the functions of `user_calls.py`. Under a plan the program around brings the pieces
(`record.py` says how, and why gradients are right). Without one, which is what a certificate compares
with, a call means:

1. `reference(...)` where the region has one;
2. else all ranks of its mesh, in this process, where it was given a mesh (`mesh=`, or layouts made on
   one): pieces are cut, the ranks run in lockstep, and the results are put together. What the code says
   on so many ranks is then what it means;
3. else the function as the only rank there is: every axis has size one, a collective hands back its
   operand. Code whose result does not depend on the number of ranks, which is what sharding is for, means
   the same in all three, and a certificate shows it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # checked on torch 2.13

from hyperparallel.errors import LayoutError, UserError
from hyperparallel.graph.region.emulation import emulate_region
from hyperparallel.graph.region.layouts import DimEntry, check_rank, layout_list, mesh_of, resolve
from hyperparallel.graph.region.seat import Seat, seated, sit
from hyperparallel.graph.region.tracing import active, traced
from hyperparallel.layout import Mesh


def local_region(
    fn: Callable[..., Any] | None = None,
    in_layouts: Any = None,
    out_layouts: Any = None,
    *,
    mesh: Mesh | None = None,
    reference: Callable[..., Any] | None = None,
    name: str = "",
) -> Any:
    """`fn` as code of one rank: a function that is called with whole tensors inside a model's forward.

    in_layouts: a list with one layout per tensor that is passed by position (other arguments have none).
    out_layouts: the layout of the result, or a list with one per result. A layout is a tuple with one
    entry per dim, as `("dp", None)`, None (replicated), or a `Layout`; `("dp", None, {"tp": "sum"})` is
    pending a sum over tp. Axes that a layout does not name hold copies. mesh: the ranks that the code is
    written for, else those of the plan. reference: what the region means on one device.

    Without `fn`, a decorator. Raises `LayoutError` and `UserError` when called: for a layout of the wrong
    rank, an unknown axis, results that do not fit their layouts, ranks that do not communicate alike.

    >>> import torch
    >>> @local_region(in_layouts=[("tp", None)], out_layouts=(None,))
    ... def column_sums(x):
    ...     return all_reduce(x.sum(0), "tp")
    >>> from hyperparallel.graph.region.user_calls import all_reduce
    >>> column_sums(torch.ones(4, 2))
    tensor([4., 4.])
    """
    if fn is None:
        return functools.partial(
            local_region, in_layouts=in_layouts, out_layouts=out_layouts, mesh=mesh, reference=reference,
            name=name,
        )  # fmt: skip
    if not callable(fn):
        raise UserError("fn", type(fn).__name__, "a function of tensors")
    ins, outs = layout_list(in_layouts, "in_layouts"), layout_list(out_layouts, "out_layouts")
    found = mesh_of([*ins, *outs], mesh, "layouts")
    return LocalRegion(fn, ins, outs, found, reference, name or _name(fn), isinstance(out_layouts, list))


def _name(fn: Any) -> str:
    given = getattr(fn, "__name__", type(fn).__name__)
    return given if given.isidentifier() else "region"


@dataclass(frozen=True)
class LocalRegion:
    """A region ready to be called; see `local_region`. As an attribute of a class it is a method."""

    fn: Callable[..., Any]
    ins: tuple[DimEntry, ...]
    outs: tuple[DimEntry, ...]
    mesh: Mesh | None
    reference: Callable[..., Any] | None
    name: str
    many: bool

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound = None if self.reference is None else _bound(self.reference, instance)
        return replace(self, fn=_bound(self.fn, instance), reference=bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        capture = active()
        mesh = self.mesh if capture is None or capture.mesh is None else capture.mesh
        # The rank's pieces inside are no whole tensors: they could not be laid out once more.
        if seated():
            raise UserError(
                f"call of {self.name}", "inside another region", "a region called from outside any"
            )
        tensors = self._tensors(args, kwargs)
        if self.mesh is not None and mesh != self.mesh:
            raise LayoutError(f"mesh of {self.name}", str(self.mesh), f"the plan's mesh {mesh}")
        if mesh is not None and mesh.size > 1 and capture is not None:
            body = self._body(args, kwargs)
            plain = [None if isinstance(x, Tensor) else x for x in args]
            # What the code can depend on beside tensors, to tell a call that is repeated from another one.
            facts = (self.fn, self.ins, self.outs, plain, kwargs)
            made = traced(capture, mesh, self.name, body, tensors, self.ins, self.outs, facts)
        elif self.reference is not None:
            return self.reference(*args, **kwargs)
        elif mesh is not None and mesh.size > 1:
            made = self._emulated(mesh, tensors, self._body(args, kwargs))
        else:
            made = sit(
                Seat(self.name, mesh, mesh.ranks[0] if mesh else 0), self._body(args, kwargs), *tensors
            )
            for i, (entry, x) in enumerate(zip(self.outs, made, strict=True)):
                check_rank(entry, x.dim(), f"result {i} of {self.name}")
        # As `out_layouts` was written: a list gives a tuple of results, even of one.
        return made if self.many else made[0]

    def _emulated(self, mesh: Mesh, tensors: Sequence[Tensor], body: Any) -> tuple[Tensor, ...]:
        ins = [
            resolve(entry, mesh, x.dim(), f"argument {i} of {self.name}")
            for i, (entry, x) in enumerate(zip(self.ins, tensors, strict=True))
        ]

        def outs(ndims: Sequence[int]) -> list[Any]:
            return [
                resolve(entry, mesh, n, f"result {i} of {self.name}")
                for i, (entry, n) in enumerate(zip(self.outs, ndims, strict=True))
            ]

        return emulate_region(self.name, body, mesh, tensors, ins, outs)

    def _tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        tensors = [x for x in args if isinstance(x, Tensor)]
        hidden = [x for x in args if not isinstance(x, Tensor)]
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves((hidden, dict(kwargs)))):
            raise UserError(
                f"arguments of {self.name}", "a tensor inside another argument, or by name",
                "tensors by position, each with a layout",
            )  # fmt: skip
        if len(tensors) != len(self.ins) or not tensors:
            raise LayoutError(
                f"in_layouts of {self.name}", list(self.ins), f"{max(len(tensors), 1)}, one a tensor passed",
                "[(...), ...]" if len(self.ins) == 1 else None,
            )  # fmt: skip
        for i, (entry, x) in enumerate(zip(self.ins, tensors, strict=True)):
            check_rank(entry, x.dim(), f"argument {i} of {self.name}")
        return tensors

    def _body(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
        """From this rank's tensors to its results, checked."""

        def body(*tensors: Tensor) -> tuple[Tensor, ...]:
            left = iter(tensors)
            given = self.fn(*(next(left) if isinstance(x, Tensor) else x for x in args), **kwargs)
            results = tuple(given) if isinstance(given, (tuple, list)) else (given,)
            kinds = ["Tensor" if isinstance(x, Tensor) else type(x).__name__ for x in results]
            if len(results) != len(self.outs) or not all(isinstance(x, Tensor) for x in results):
                raise UserError(
                    f"results of {self.name}", kinds, f"{len(self.outs)} tensors, one for each of out_layouts"
                )
            return results

        return body


def _bound(fn: Any, instance: Any) -> Any:
    return fn.__get__(instance) if inspect.isfunction(fn) else fn
