"""Debug mode: before each collective, check that all members of the group are making the same one.

`HYPERPARALLEL_DEBUG=collectives` puts this transport on top of the real one. Each member writes what
it is about to do (op, dtype, shape, sizes, line of the caller) to the job's store under the number
of the call, reads the others', and raises on all members when they do not fit, within the time that
the slowest takes to make its own call. A store round trip per call costs up to a millisecond: it is
not for timing.

Leaves out members that never call anything: the timeout of the collective ends those.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from hyperparallel.errors import RunError
from hyperparallel.runtime.comm.collectives import InFlight, InFlightMany, Sends, Transport
from hyperparallel.runtime.comm.group import Group

# Private names, checked on torch 2.13: the store that the default process group was made with.
from torch.distributed.distributed_c10d import _get_default_store  # isort: skip

CallRecord = dict[str, Any]
"""One member's call: op, dtype, shape, the arguments by name, where it stands."""

_PACKAGE = str(Path(__file__).parents[1])


class CheckedTransport:
    """Checks every call against the other members', then passes it on."""

    def __init__(self, transport: Transport, group: Group, timeout: timedelta) -> None:
        self.transport, self.group, self.timeout = transport, group, timeout
        self._store = _get_default_store()
        self._count = 0

    def all_reduce(self, x: Tensor, op: str) -> InFlight:
        self._check("all_reduce", x, reduce=op)
        return self.transport.all_reduce(x, op)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> InFlight:
        self._check("all_gather", x, dim=dim, sizes=list(sizes))
        return self.transport.all_gather(x, dim, sizes)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> InFlight:
        self._check("reduce_scatter", x, dim=dim, sizes=list(sizes), reduce=op)
        return self.transport.reduce_scatter(x, dim, sizes, op)

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
    ) -> InFlight:
        self._check(
            "all_to_all",
            x,
            split_dim=split_dim,
            split_sizes=list(split_sizes),
            concat_dim=concat_dim,
            concat_sizes=list(concat_sizes),
        )
        return self.transport.all_to_all(x, split_dim, split_sizes, concat_dim, concat_sizes)

    def permute(self, x: Tensor, sends: Sends, recv_shape: Sequence[int]) -> InFlight:
        pairs = [list(pair) for pair in sends]
        self._check("permute", x, sends=pairs, recv_shape=list(recv_shape))
        return self.transport.permute(x, sends, recv_shape)

    def all_gather_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> InFlightMany:
        for x, dim, parts in zip(xs, dims, sizes, strict=True):
            self._check("all_gather", x, dim=dim, sizes=list(parts))
        return self.transport.all_gather_many(xs, dims, sizes)

    def reduce_scatter_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], op: str
    ) -> InFlightMany:
        for x, dim, parts in zip(xs, dims, sizes, strict=True):
            self._check("reduce_scatter", x, dim=dim, sizes=list(parts), reduce=op)
        return self.transport.reduce_scatter_many(xs, dims, sizes, op)

    def _check(self, op: str, x: Tensor, **arguments: Any) -> None:
        mine = {"op": op, "dtype": str(x.dtype), "shape": list(x.shape), **arguments}
        where = {"where": _call_site()}
        # The group's ranks keep groups apart, whatever their order of making.
        prefix = f"debug/{'-'.join(map(str, self.group.ranks))}/{self._count}/"
        self._count += 1
        self._store.set(prefix + str(self.group.index), json.dumps(mine | where))
        keys = [prefix + str(member) for member in range(self.group.size)]
        self._store.wait(keys, self.timeout)
        calls = [json.loads(self._store.get(key)) for key in keys]
        problem = disagreement(calls)
        if problem:
            lines = [
                f"  rank {rank}: {_described(call)}"
                for rank, call in zip(self.group.ranks, calls, strict=True)
            ]
            raise RunError(
                f"collective {self._count} of group {self.group.name}: {problem}\n" + "\n".join(lines)
            )


def disagreement(calls: Sequence[CallRecord]) -> str:
    """Why the members' calls do not fit together, or "".

    >>> disagreement([{"op": "all_reduce", "dtype": "torch.float32", "shape": [n], "reduce": "sum"}
    ...               for n in (2, 3)])
    'shape differs'
    """
    first = calls[0]
    for name in ("op", "dtype", "reduce", "dim", "sizes", "split_dim", "concat_dim", "sends"):
        if any(call.get(name) != first.get(name) for call in calls):
            return f"{name} differs"
    free = {first["dim"]} if first["op"] == "all_gather" else set()
    if first["op"] == "all_to_all":
        free = {first["split_dim"], first["concat_dim"]}
    if first["op"] != "permute":
        shapes = [[s for d, s in enumerate(c["shape"]) if d not in free] for c in calls]
        if any(shape != shapes[0] or len(c["shape"]) != len(first["shape"])
               for shape, c in zip(shapes, calls, strict=True)):  # fmt: skip
            return "shape differs"
    if first["op"] == "all_to_all":
        return _uneven_exchange(calls)
    if first["op"] == "permute":
        for source, target in first["sends"]:
            if _numel(calls[source]["shape"]) != _numel(calls[target]["recv_shape"]):
                return f"member {target} expects another size than member {source} sends"
    return ""


def _uneven_exchange(calls: Sequence[CallRecord]) -> str:
    same_dim = calls[0]["split_dim"] == calls[0]["concat_dim"]
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            expected = receiver["concat_sizes"][i]
            sent = sender["split_sizes"][j] if same_dim else sender["shape"][sender["concat_dim"]]
            mine = calls[j]["split_sizes"][j]
            if expected != sent or (not same_dim and sender["split_sizes"][j] != mine):
                return f"member {j} expects another size than member {i} sends"
    return ""


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _described(call: CallRecord) -> str:
    rest = {k: v for k, v in call.items() if k not in ("op", "dtype", "shape", "where")}
    extra = ", ".join(f"{name} {value}" for name, value in rest.items())
    return f"{call['op']} of {call['dtype']} {tuple(call['shape'])} ({extra}) at {call['where']}"


def _call_site() -> str:
    """The innermost line outside this package's runtime."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_PACKAGE):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
