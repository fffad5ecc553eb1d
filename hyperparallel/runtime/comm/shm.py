"""Collectives through shared memory: the transport between ranks of one machine, on CPU tensors.

Each group has one anonymous mapping (a memfd that the first member makes and the others open
through /proc), so there is no file to remove, however a rank ends. The moving, waiting and reducing
is in `_shm.cpp`; here tensors become pointers. A collective that finds its peers' data already
there is complete when its start returns. Peers that died, missed the deadline or called something
else make the wait raise, and then the group stays unusable.

Tensors that are not on the CPU, and types that cannot be reduced here, go to the process group.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperparallel.errors import RunError
from hyperparallel.runtime import host
from hyperparallel.runtime.comm import native
from hyperparallel.runtime.comm.collectives import InFlight, InFlightMany, Ready, Sends, Several, Transport
from hyperparallel.runtime.comm.group import Group, PeerLost
from hyperparallel.runtime.comm.meeting import why_peers_wait

SLOTS, CHUNK_BYTES = 8, 128 << 10
"""Of each ring: what a rank can send ahead of its slowest reader is 1 MiB."""

MAX_MEMBERS = 64

LOOK_NS = 10**9
"""How long a wait lasts before the rank looks whether a peer waits for it in turn; see `meeting.py`."""

SPINS = 200
"""Looks at the doorbell before sleeping, a few microseconds: what a sleep and wake-up costs."""

_REDUCIBLE = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.int64: 3,
    torch.int32: 4,
    torch.int16: 5,
    torch.int8: 6,
    torch.uint8: 7,
    torch.bool: 7,
}
_OPS = {"sum": 0, "max": 1, "min": 2, "prod": 3, "avg": 4}
_LATE, _DIED, _SIGNAL, _STRANGE = 1, 2, 3, 4
"""What `hp_wait` says in its lowest byte, if not 0."""
_KINDS = ("nothing", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")


class DeferredCollective:
    """A collective that is left to its wait."""

    __slots__ = ("handle", "result", "transport")

    def __init__(self, transport: SharedMemoryTransport, handle: int, result: Tensor, source: Tensor) -> None:
        self.transport, self.handle, self.result = transport, handle, result
        _under_way[handle] = result, source

    def wait(self) -> Tensor:
        handle = self.handle
        if handle:
            transport = self.transport
            code = transport.wait(handle, transport.look_ns, transport.spins, transport.strange)
            if code:
                transport.trouble(handle, code)
            del _under_way[handle]
            self.handle = 0
        return self.result


_under_way: dict[int, tuple[Tensor, Tensor]] = {}
"""By operation, the tensors that the library has pointers into.

Of the process, not of a collective or its transport: where an error came between start and wait both are
gone, but the library goes on moving the operation's bytes in the waits of other groups.
"""


class SharedMemoryTransport:
    """Collectives of one group of ranks of this machine."""

    def __init__(self, group: Group, comm: int, others: Transport, timeout_seconds: float) -> None:
        """comm: what `open_shared` returned. others: carries what shared memory cannot."""
        library = native.library()
        self.group, self.comm, self.others = group, comm, others
        self.timeout_ns = int(timeout_seconds * 1e9)
        self.look_ns = min(LOOK_NS, self.timeout_ns)
        # Spinning takes the core that the peer needs when there are fewer cores than ranks.
        self.spins = SPINS if host.usable_cores() >= group.size else 0
        self._strange = (ctypes.c_uint64 * 2)()
        self.strange = ctypes.addressof(self._strange)
        # Bound once: looking a function up in the library would be part of every collective.
        self.wait = library.hp_wait
        self._all_reduce, self._all_gather = library.hp_all_reduce, library.hp_all_gather
        self._reduce_scatter, self._all_to_all = library.hp_reduce_scatter, library.hp_all_to_all
        self._permute = library.hp_permute
        self._arrays: dict[tuple[int, ...], tuple[Any, int]] = {}
        self._broken = ""

    def all_reduce(self, x: Tensor, op: str, over: bool = False) -> InFlight:
        kind = _REDUCIBLE.get(x.dtype)
        if kind is None or not x.is_cpu or self._broken:
            return self._fallback("all_reduce").all_reduce(x, op, over)
        if not x.is_contiguous():
            x = x.contiguous()
        out = x if over else torch.empty_like(x)
        handle = self._all_reduce(self.comm, x.data_ptr(), out.data_ptr(), x.nbytes, kind, _OPS[op])
        # No handle: the peers' data was there, and all is done.
        return DeferredCollective(self, handle, out, x) if handle else Ready(out)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> InFlight:
        if not x.is_cpu or self._broken:
            return self._fallback("all_gather").all_gather(x, dim, sizes)
        if not x.is_contiguous():
            x = x.contiguous()
        shape = list(x.shape)
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * x.element_size()
        shape[dim] = sum(sizes)
        out = x.new_empty(shape)
        handle = self._all_gather(
            self.comm, x.data_ptr(), out.data_ptr(), self._array(sizes), outer, inner, _code(x)
        )
        return DeferredCollective(self, handle, out, x) if handle else Ready(out)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> InFlight:
        kind = _REDUCIBLE.get(x.dtype)
        if kind is None or not x.is_cpu or self._broken:
            return self._fallback("reduce_scatter").reduce_scatter(x, dim, sizes, op)
        if not x.is_contiguous():
            x = x.contiguous()
        shape = list(x.shape)
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * x.element_size()
        shape[dim] = sizes[self.group.index]
        out = x.new_empty(shape)
        handle = self._reduce_scatter(
            self.comm,
            x.data_ptr(),
            out.data_ptr(),
            self._array(sizes),
            outer,
            inner,
            kind,
            _OPS[op],
        )
        return DeferredCollective(self, handle, out, x) if handle else Ready(out)

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
    ) -> InFlight:
        if not x.is_cpu or self._broken:
            other = self._fallback("all_to_all")
            return other.all_to_all(x, split_dim, split_sizes, concat_dim, concat_sizes)
        x = x.contiguous()
        before, after, item = list(x.shape), list(x.shape), x.element_size()
        after[split_dim] = split_sizes[self.group.index]
        after[concat_dim] = sum(concat_sizes)
        out = x.new_empty(after)
        handle = self._all_to_all(
            self.comm,
            x.data_ptr(),
            out.data_ptr(),
            self._array(split_sizes),
            math.prod(before[:split_dim]),
            math.prod(before[split_dim + 1 :]) * item,
            self._array(concat_sizes),
            math.prod(after[:concat_dim]),
            math.prod(after[concat_dim + 1 :]) * item,
            _code(x),
        )
        return DeferredCollective(self, handle, out, x) if handle else Ready(out)

    def permute(self, x: Tensor, sends: Sends, recv_shape: Sequence[int]) -> InFlight:
        if not x.is_cpu or self._broken:
            return self._fallback("permute").permute(x, sends, recv_shape)
        x, me = x.contiguous(), self.group.index
        out = x.new_empty(tuple(recv_shape))
        source = next((s for s, t in sends if t == me), None)
        targets = [t for s, t in sends if s == me and t != me]
        if source is None:
            out.zero_()
        elif source == me:
            out.view(-1).copy_(x.view(-1))
        handle = self._permute(
            self.comm,
            x.data_ptr(),
            x.nbytes,
            out.data_ptr(),
            out.nbytes,
            self._array(targets),
            len(targets),
            -1 if source is None or source == me else source,
            _code(x),
        )
        return DeferredCollective(self, handle, out, x) if handle else Ready(out)

    def broadcast(self, x: Tensor, root: int, root_shape: Sequence[int]) -> InFlight:
        """A gather to which only the root gives something: written once, read by every member."""
        if not x.is_cpu or self._broken:
            return self._fallback("broadcast").broadcast(x, root, root_shape)
        if self.group.index == root:
            x = x.contiguous()
        out = x.new_empty(tuple(root_shape))
        # In units of the whole tensor, so one piece is all and the others are empty.
        given = self._array([int(member == root) for member in range(self.group.size)])
        handle = self._all_gather(
            self.comm, x.data_ptr(), out.data_ptr(), given, 1, out.nbytes, _code(x) | _BROADCAST
        )
        return DeferredCollective(self, handle, out, x) if handle else Ready(out)

    def all_gather_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> InFlightMany:
        """One after another: packing would cost more than the calls that it saves."""
        if not all(x.is_cpu for x in xs):
            return self._fallback("all_gather").all_gather_many(xs, dims, sizes)
        return Several(list(map(self.all_gather, xs, dims, sizes)))

    def reduce_scatter_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], op: str
    ) -> InFlightMany:
        if not all(x.is_cpu and x.dtype in _REDUCIBLE for x in xs):
            return self._fallback("reduce_scatter").reduce_scatter_many(xs, dims, sizes, op)
        return Several([self.reduce_scatter(*one, op) for one in zip(xs, dims, sizes, strict=True)])

    def all_reduce_many(self, xs: Sequence[Tensor], op: str, over: bool = False) -> InFlightMany:
        if not all(x.is_cpu and x.dtype in _REDUCIBLE for x in xs):
            return self._fallback("all_reduce").all_reduce_many(xs, op, over)
        return Several([self.all_reduce(x, op, over) for x in xs])

    def trouble(self, handle: int, code: int) -> None:
        """See a wait through that did not simply succeed; raises what went wrong."""
        group = self.group
        where = f"rank {group.rank} in group {group.name} (ranks {group.ranks})"
        # One deadline for all calls: signals that come regularly (a profiler's) must not put it off.
        limit = time.monotonic_ns() + self.timeout_ns - (self.look_ns if code & 255 == _LATE else 0)
        while code & 255 in (_LATE, _SIGNAL):  # Python has run the signal's handler by now
            left = limit - time.monotonic_ns()
            if code & 255 == _LATE:
                why = why_peers_wait(group.rank, group.ranks)
                if why:
                    self._broken = f"{where}: deadlock: this rank waits in a collective, and {why}"
                    raise RunError(self._broken)
                if left <= 0:
                    break
            code = self.wait(handle, max(1, min(left, self.look_ns)), self.spins, self.strange)
        if code == 0:
            return
        peer = group.ranks[code >> 8]
        if code & 255 == _DIED:
            error: RunError = PeerLost(f"{where}: rank {peer} died during a collective")
        elif code & 255 == _STRANGE:
            error = RunError(
                f"{where}: rank {peer} made another collective than this rank: it sent "
                f"{_described(self._strange[0], self._strange[1])}; set "
                "HYPERPARALLEL_DEBUG=collectives to see both calls"
            )
        else:
            seconds = self.timeout_ns / 1e9
            error = PeerLost(f"{where}: rank {peer} did not take part within {seconds:g} s")
        self._broken = str(error)
        raise error

    def _fallback(self, op: str) -> Transport:
        # For good: one member gave up midway, so nobody knows whose message comes next on a ring.
        if self._broken:
            raise PeerLost(f"{op} after a failed collective: {self._broken}")
        return self.others

    def _array(self, sizes: Sequence[int]) -> int:
        """The address of sizes as a C array that stays alive."""
        key = tuple(sizes)
        found = self._arrays.get(key)
        if found is None:
            array = (ctypes.c_int64 * max(1, len(key)))(*key)
            # Kept: making a ctypes array in every call would show in small collectives.
            found = self._arrays[key] = (array, ctypes.addressof(array))
        return found[1]


def open_shared(group: Group) -> int | str:
    """The handle of the group's mapping, or why there is none; all members call this together."""
    me = os.getpid()
    descriptor, reason = -1, ""
    try:
        library = native.library()
        if group.index == 0:
            descriptor = _memory(library.hp_size(group.size, *_sizes()))
    except (native.BuildError, OSError) as error:
        reason = f"rank {group.rank}: {error}"
    if group.size > MAX_MEMBERS:
        reason = f"more than {MAX_MEMBERS} members"
    # Collective, with no return before: a member that left early would leave the others waiting.
    cards: list[Any] = [None] * group.size
    dist.all_gather_object(cards, (me, descriptor, _machine(), reason), group=group.handle)
    if len({card[2] for card in cards}) > 1:
        reason = "its ranks are on several machines"
    reason = reason or next((card[3] for card in cards if card[3]), "")
    comm = 0
    if not reason:
        try:
            # Member 0 holds its descriptor until all have mapped the memory: the second round below.
            comm = _map(group, [card[0] for card in cards], cards[0][1])
        except OSError as error:
            reason = f"rank {group.rank} cannot map the memory of rank {group.ranks[0]}: {error}"
        # Everybody has mapped it, or nobody uses it. No file ever had a name.
        outcomes: list[Any] = [None] * group.size
        dist.all_gather_object(outcomes, reason, group=group.handle)
        reason = next((outcome for outcome in outcomes if outcome), "")
    if descriptor >= 0:
        os.close(descriptor)  # the mappings keep the memory
    return reason or comm


def _sizes() -> tuple[int, int, int, int]:
    return SLOTS, CHUNK_BYTES, SLOTS, CHUNK_BYTES


def _memory(size: int) -> int:
    descriptor = os.memfd_create("hyperparallel", os.MFD_CLOEXEC)
    os.truncate(descriptor, size)
    return descriptor


def _map(group: Group, pids: list[int], descriptor: int) -> int:
    library = native.library()
    # Opened anew through /proc: no name in any file system, so nothing is left behind by a kill.
    mine = os.open(f"/proc/{pids[0]}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        array = (ctypes.c_int64 * group.size)(*pids)
        comm = library.hp_open(mine, group.size, group.index, *_sizes(), ctypes.addressof(array))
    finally:
        os.close(mine)
    if not comm:
        raise OSError("mmap failed")
    return int(comm)


def _machine() -> str:
    """Equal for processes that can see each other's /proc entries and open what is there."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError as error:
        return f"process {os.getpid()}: {error}"


def _code(x: Tensor) -> int:
    """A number for the dtype, for members to compare."""
    return _CODES[x.dtype]


# Booleans have a number of their own here, though they are reduced as bytes.
_CODES = {
    kind: _REDUCIBLE.get(kind, 16 + i) if kind is not torch.bool else 8
    for i, kind in enumerate(sorted({k for k in vars(torch).values() if isinstance(k, torch.dtype)}, key=str))
}


_BROADCAST = 1 << 8
"""Beside a dtype's number: the gather is a broadcast, which other members must be making too."""


def _described(tag: int, num_bytes: int) -> str:
    code = tag >> 8 & 255
    dtype = next((str(kind) for kind, number in _CODES.items() if number == code), "?")
    kind = _KINDS[tag & 255]
    if kind == "all_gather" and tag >> 8 & _BROADCAST:
        kind = "broadcast"
    return f"{kind} of {dtype}, {num_bytes} bytes"
