"""Collectives over a torch process group (gloo or NCCL): the transport that works between any ranks.

Calls the process group's own methods; the functional collectives of torch go through the dispatcher
and cost several times as much per call. Guards against what gloo gets wrong (torch 2.13): it sends
strided tensors as if they were dense, and refuses uneven gathers and most integer types. So inputs
are made contiguous, gathers and exchanges are done on bytes, and uneven gathers are sends and
receives.

[Note: direct messages] Large gathers and scattered sums on CPU are messages between every two
members, straight between the tensors that hold the pieces: as many bytes as gloo's rings carry, for a half
to two thirds of the CPU time (2 and 4 ranks, 2 to 16 MB, torch 2.13), and tensors need not be packed into
one message first. NCCL has its own rings, which are better than ours.

[Note: one round] gloo's ring reduces in 2 (n - 1) rounds, and each round wakes three threads on either side.
Up to some megabytes every member sends the others all it has, and each adds up for itself: one round, no
more bytes between two members, and every member gets the same bits. Measured beside gloo's all-reduce, CPU
time (torch 2.13): a half to two thirds for 64 B to 2 MB and two members, under a half up to 512 KB and four;
a wash for 8 MB and two; double for 8 MB and three. One element is the exception: gloo sends it at once.

Leaves out which transport a group gets (`transport.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hyperparallel.errors import RunError
from hyperparallel.runtime.comm.collectives import InFlight, InFlightMany, Ready, Sends, Several
from hyperparallel.runtime.comm.group import Group, PeerLost
from hyperparallel.runtime.comm.meeting import why_peers_wait
from hyperparallel.runtime.comm.packing import (
    Mixed,
    Packed,
    PieceSizes,
    packed_pieces,
    packed_whole,
    totals,
    unpacked_pieces,
    unpacked_whole,
)
from hyperparallel.runtime.comm.reducing import REDUCE_OP, Finish, reduce_into, reducible, shaped

# Private names, checked on torch 2.13: the option objects of the process group methods.
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceScatterOptions  # isort: skip

DIRECT_BYTES = 512 << 10
"""From this many bytes per member on, direct messages cost less; see [Note: direct messages]."""

ONE_ROUND_BYTES, ONE_ROUND_EXTRA_BYTES = 8 << 20, 1 << 20
"""What a member may receive in all, and beyond what a ring would bring it; see [Note: one round]."""


class Works:
    """Process-group works under way, and how their buffers become the result."""

    __slots__ = ("finish", "group", "keep", "op", "result", "works")

    def __init__(
        self,
        op: str,
        group: Group,
        works: list[Any],
        result: Tensor,
        keep: object,
        finish: Finish | None = None,
    ) -> None:
        self.op, self.group, self.works, self.result = op, group, works, result
        self.keep, self.finish = keep, finish

    def wait(self) -> Tensor:
        if self.works:
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as error:
                group = self.group
                # gloo speaks of a connection that was closed; at a deadline it does not say whom it misses.
                kind = PeerLost if "onnection" in str(error) else RunError
                why = why_peers_wait(group.rank, group.ranks)
                raise kind(
                    f"{self.op} on rank {group.rank} in group {group.name} (ranks {group.ranks}) "
                    f"failed: {f'deadlock: {why}; ' if why else ''}{error}"
                ) from error
            self.works = []
            # On CUDA this stream now waits for the collective's: what is freed here goes to work behind that.
            self.keep = None
            if self.finish is not None:
                self.result, self.finish = self.finish(self.result), None
        return self.result


class ProcessGroupTransport:
    """Collectives of one group over its process group."""

    def __init__(self, group: Group) -> None:
        if group.handle is None:
            raise group.refuse("a collective")
        self.group = group

    @property
    def handle(self) -> Any:
        """Asked of the group each time, so that `Groups.close` can end it."""
        return self.group.handle

    def all_reduce(self, x: Tensor, op: str, over: bool = False) -> InFlight:
        if x.numel() == 0:
            return Ready(x.contiguous())
        if self._takes_one_round(x):
            return self._all_reduce_in_one_round(x.contiguous(), op)
        if not over or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        out, finish = reducible(x.view(-1), op, self.group)
        options = AllreduceOptions()
        options.reduceOp = REDUCE_OP[op]
        work = self.handle.allreduce([out], options)
        return Works("all_reduce", self.group, [work], out, None, shaped(finish, x.shape))

    def _takes_one_round(self, x: Tensor) -> bool:
        """The same on every member."""
        received = (self.group.size - 1) * x.nbytes
        extra = received - 2 * received // self.group.size
        return x.is_cpu and x.numel() > 1 and received <= ONE_ROUND_BYTES and extra <= ONE_ROUND_EXTRA_BYTES

    def _all_reduce_in_one_round(self, x: Tensor, op: str) -> InFlight:
        """Of a contiguous tensor: every member sends it to all others, and reduces in the group's order."""
        me, num_others = self.group.index, self.group.size - 1
        sizes = [0 if member == me else x.nbytes for member in range(self.group.size)]
        flat = x.view(-1)
        received = flat.new_empty((num_others, flat.numel()))
        sent = (flat if num_others == 1 else flat.repeat(num_others)).view(torch.uint8)
        work = self.handle.alltoall_base(received.view(-1).view(torch.uint8), sent, sizes, sizes)

        def reduce(received: Tensor) -> Tensor:
            return reduce_into([*received[:me], flat, *received[me:]], op, received[0]).view(x.shape)

        return Works("all_reduce", self.group, [work], received, sent, reduce)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> InFlight:
        unit = math.prod(s for d, s in enumerate(x.shape) if d != dim)
        if unit == 0 or sum(sizes) == 0:
            return Ready(x.new_empty(_with(x.shape, dim, sum(sizes))))
        flat = x.contiguous().view(-1)
        if not x.is_cpu and len(set(sizes)) > 1:
            return self._padded_gather(flat, x.shape, dim, sizes)
        out = flat.new_empty(unit * sum(sizes))
        source, target = flat.view(torch.uint8), out.view(torch.uint8)
        if len(set(sizes)) == 1 and not self._is_direct(x, dim, sizes):
            works = [self.handle._allgather_base(target, source)]
        else:
            parts = target.split([unit * size * x.element_size() for size in sizes])
            peers = [p for p in range(self.group.size) if p != self.group.index]
            works = self._exchange(dict.fromkeys(peers, source), {p: parts[p] for p in peers})
            # While the messages travel.
            parts[self.group.index].copy_(source)

        def join(out: Tensor) -> Tensor:
            return _join(out, x.shape, dim, sizes)

        return Works("all_gather", self.group, works, out, (x, source, target), join)

    def _padded_gather(self, flat: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> InFlight:
        """Uneven pieces as even ones: NCCL's sends and receives would have to be grouped."""
        unit = math.prod(s for d, s in enumerate(shape) if d != dim)
        longest = unit * max(sizes)
        padded = flat.new_zeros(longest)
        padded[: flat.numel()] = flat
        out = flat.new_empty(longest * self.group.size)
        source, target = padded.view(torch.uint8), out.view(torch.uint8)

        def join(out: Tensor) -> Tensor:
            rows = out.view(-1, longest)
            dense = torch.cat([row[: unit * size] for row, size in zip(rows, sizes, strict=True)])
            return _join(dense, shape, dim, sizes)

        works = [self.handle._allgather_base(target, source)]
        return Works("all_gather", self.group, works, out, (source, target), join)

    def all_gather_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> InFlightMany:
        """Large tensors directly, the others in one flat message; pieces need not be even."""

        def packed(xs: Sequence[Tensor], dims: Sequence[int], sizes: PieceSizes) -> InFlightMany:
            shapes = [x.shape for x in xs]
            message = self.all_gather(packed_whole(xs), 0, totals(xs, dims, sizes))
            return Packed(message, lambda flat: unpacked_pieces(flat, shapes, dims, sizes))

        return self._many(xs, dims, sizes, self.all_gather, packed)

    def reduce_scatter_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], op: str
    ) -> InFlightMany:
        """Large tensors directly, the others in one flat message; pieces need not be even."""
        me = self.group.index

        def one(x: Tensor, dim: int, sizes: Sequence[int]) -> InFlight:
            return self.reduce_scatter(x, dim, sizes, op)

        def packed(xs: Sequence[Tensor], dims: Sequence[int], sizes: PieceSizes) -> InFlightMany:
            shapes = [_with(x.shape, dim, parts[me]) for x, dim, parts in zip(xs, dims, sizes, strict=True)]
            message = one(packed_pieces(xs, dims, sizes), 0, totals(xs, dims, sizes))
            return Packed(message, lambda flat: unpacked_whole(flat, shapes))

        return self._many(xs, dims, sizes, one, packed)

    def _many(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: PieceSizes,
        one: Callable[[Tensor, int, Sequence[int]], InFlight],
        packed: Callable[[Sequence[Tensor], Sequence[int], PieceSizes], InFlightMany],
    ) -> InFlightMany:
        """`one` for each large tensor whose pieces are dense in it, `packed` for the rest together."""
        calls = list(zip(xs, dims, sizes, strict=True))
        alone = [math.prod(x.shape[:dim]) == 1 and self._is_direct(x, dim, parts) for x, dim, parts in calls]
        if alone.count(False) == 1:
            # A single one would be packed and unpacked for nothing.
            alone[alone.index(False)] = True
        if all(alone):
            return Several([one(*call) for call in calls])
        singles = [one(*call) for call, is_alone in zip(calls, alone, strict=True) if is_alone]
        rest = [call for call, is_alone in zip(calls, alone, strict=True) if not is_alone]
        return Mixed(singles, packed(*map(list, zip(*rest, strict=True))), alone)

    def _is_direct(self, x: Tensor, dim: int, sizes: Sequence[int]) -> bool:
        """Whether pieces of `dim` go in direct messages; the same on every member."""
        unit = math.prod(s for d, s in enumerate(x.shape) if d != dim) * x.element_size()
        # By the largest piece, not by this member's own: all must choose alike.
        return x.is_cpu and unit * max(sizes) >= DIRECT_BYTES

    def all_reduce_many(self, xs: Sequence[Tensor], op: str, over: bool = False) -> InFlightMany:
        """One flat message, reduced where it was packed: no more copies than one tensor at a time."""
        if len(xs) == 1:
            return Several([self.all_reduce(xs[0], op, over)])
        shapes = [x.shape for x in xs]
        message = self.all_reduce(packed_whole(xs), op, over=True)
        return Packed(message, lambda flat: unpacked_whole(flat, shapes))

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> InFlight:
        if x.numel() == 0:
            return Ready(x.new_empty(_with(x.shape, dim, sizes[self.group.index])))
        if op in ("sum", "avg") and x.is_floating_point() and self._is_direct(x, dim, sizes):
            return self._direct_reduce_scatter(x, dim, sizes, op)
        packed, finish = reducible(_pack(x, dim, sizes), op, self.group)
        unit = packed.numel() // x.shape[dim]
        shape = _with(x.shape, dim, sizes[self.group.index])
        options = ReduceScatterOptions()
        options.reduceOp = REDUCE_OP[op]
        out = packed.new_empty(unit * sizes[self.group.index])
        if len(set(sizes)) == 1:
            work = self.handle._reduce_scatter_base(out, packed, options)
        else:
            parts = list(packed.split([unit * size for size in sizes]))
            work = self.handle.reduce_scatter([out], [parts], options)
        return Works("reduce_scatter", self.group, [work], out, packed, shaped(finish, shape))

    def _direct_reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> InFlight:
        """Every member sends the others their pieces and adds up what it is sent, in the group's order."""
        me, unit = self.group.index, x.numel() // x.shape[dim]
        parts = list(_pack(x, dim, sizes).split([unit * size for size in sizes]))
        sends = {p: part.view(torch.uint8) for p, part in enumerate(parts) if p != me}
        received = parts[me].new_empty((self.group.size, parts[me].numel()))
        recvs = {p: received[p].view(torch.uint8) for p in sends}
        works = self._exchange(sends, recvs)
        shape = _with(x.shape, dim, sizes[me])

        def add(received: Tensor) -> Tensor:
            pieces = [*received[:me], parts[me], *received[me + 1 :]]
            return reduce_into(pieces, op, received[me]).view(shape)

        return Works("reduce_scatter", self.group, works, received, parts, add)

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
    ) -> InFlight:
        shape = _with(x.shape, split_dim, split_sizes[self.group.index])
        unit = math.prod(s for d, s in enumerate(shape) if d != concat_dim) * x.element_size()
        source = _pack(x, split_dim, split_sizes).view(torch.uint8)
        out = x.new_empty(unit // x.element_size() * sum(concat_sizes))
        per_split = x.numel() * x.element_size() // max(1, x.shape[split_dim])
        work = self.handle.alltoall_base(
            out.view(torch.uint8),
            source,
            [unit * size for size in concat_sizes],
            [per_split * size for size in split_sizes],
        )

        def join(out: Tensor) -> Tensor:
            return _join(out, shape, concat_dim, concat_sizes)

        return Works("all_to_all", self.group, [work], out, source, join)

    def permute(self, x: Tensor, sends: Sends, recv_shape: Sequence[int]) -> InFlight:
        me = self.group.index
        source = x.contiguous().view(-1)
        out = x.new_empty(recv_shape)
        sources = [s for s, t in sends if t == me]
        targets = {t: source.view(torch.uint8) for s, t in sends if s == me and t != me}
        inputs = {s: out.view(-1).view(torch.uint8) for s in sources if s != me}
        works = self._exchange(targets, inputs)
        if not sources:
            out.zero_()
        elif sources == [me]:
            out.view(-1).copy_(source)
        return Works("permute", self.group, works, out, source)

    def broadcast(self, x: Tensor, root: int, root_shape: Sequence[int]) -> InFlight:
        """In bytes; the root sends a copy, which is dense (gloo sends a strided tensor wrongly)."""
        mine = self.group.index == root
        out = x.clone(memory_format=torch.contiguous_format) if mine else x.new_empty(tuple(root_shape))
        if out.numel() == 0:
            return Ready(out)
        options = BroadcastOptions()
        options.rootRank = root
        work = self.handle.broadcast([out.view(-1).view(torch.uint8)], options)
        return Works("broadcast", self.group, [work], out, None)

    def _exchange_of_two(self, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> Any:
        """One exchange with the other member; it takes part though it only sends, or only receives."""
        peer = 1 - self.group.index
        nothing = torch.empty(0, dtype=torch.uint8)
        sent, received = sends.get(peer, nothing), recvs.get(peer, nothing)
        out_sizes, in_sizes = [0, 0], [0, 0]
        out_sizes[peer], in_sizes[peer] = received.numel(), sent.numel()
        return self.handle.alltoall_base(received, sent, out_sizes, in_sizes)

    def _exchange(self, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> list[Any]:
        """Point-to-point messages by member; empty ones are skipped on both sides."""
        recvs = {peer: b for peer, b in recvs.items() if b.numel()}
        sends = {peer: b for peer, b in sends.items() if b.numel()}
        device = next((b.device for b in (*recvs.values(), *sends.values()) if b.is_cuda), None)
        if device is None and self.group.size == 2 and (sends or recvs):
            # One exchange is posted by gloo's own thread, which this one then need not share its locks with:
            # a third less CPU time than a send and a receive for 512 KB, the same for 28 MB (torch 2.13).
            return [self._exchange_of_two(sends, recvs)]
        if device is not None:
            # NCCL runs the messages of a pair one by one: two members that receive first would
            # deadlock, unless all messages start as one (private names, checked on torch 2.13).
            self.handle._start_coalescing(device)
        works = [self.handle.recv([b], peer, 0) for peer, b in recvs.items()]
        works += [self.handle.send([b], peer, 0) for peer, b in sends.items()]
        return works if device is None else [self.handle._end_coalescing(device)]


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The pieces of `dim` one after the other, each dense."""
    if math.prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    return torch.cat([piece.reshape(-1) for piece in x.split(list(sizes), dim)])


def _join(flat: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Tensor:
    """Dense pieces, one after the other, joined along `dim`; the inverse of `_pack`."""
    whole = _with(shape, dim, sum(sizes))
    if math.prod(shape[:dim]) == 1:
        return flat.view(whole)
    unit = math.prod(s for d, s in enumerate(shape) if d != dim)
    parts = flat.split([unit * size for size in sizes])
    return torch.cat(
        [part.view(_with(shape, dim, size)) for part, size in zip(parts, sizes, strict=True)], dim
    )
