"""One rank's program as a list of instructions: what each computes, reads, moves and makes.

The same list is simulated on a clock (`simulate/rank_tasks.py`) and laid beside a measured run. It is made
from a program by `graph/predict/instructions.py`; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axes = tuple[str, ...]
Accesses = tuple[tuple[float, float], ...]
"""(distance, bytes): distance is what the rank has touched, in bytes, since it touched the same before."""
Tensors = tuple[tuple[str, float], ...]
"""(name, bytes of device memory) of tensors; views of one another are one, in another tier it has 0 bytes."""


@dataclass(frozen=True)
class Instruction:
    """One line of a rank's program.

    kind: of an op what it is grouped under ("matmul", "elementwise"), of a start what it begins. needs:
    positions of the instructions whose results it reads; a wait's first is its start. flops, num_bytes:
    arithmetic and memory traffic of an op, bytes received of a start. axes: mesh axes of a collective.
    one_round: whether no message of it waits for another one. stream: where what a start begins goes on; by
    default that of the axes. tier: the memory in which what it makes lies. makes, reads, last_reads: the
    tensors that it makes, reads, and reads as the last; the operand of a start is read until its wait.
    kernel: the op's own name. calls: how many equal ones it stands for; parts: several kinds of them. sizes:
    m, n, k of a matrix product. reuse: what it touches, and how long after it was touched before.

    >>> copy = Instruction("fetch", "copy", "start", makes=(("w", 64.0),), stream="copy.host.in")
    >>> copy.stream, copy.alloc_bytes, Instruction("sum", "all_reduce", "start", axes=("dp",)).stream
    ('copy.host.in', 64.0, 'comm.dp')
    """

    name: str
    kind: str
    role: Literal["op", "start", "wait"] = "op"
    needs: tuple[int, ...] = ()
    flops: float = 0.0
    num_bytes: float = 0.0
    axes: Axes = ()
    dtype: str = "float32"
    stream: str = ""
    tier: str = "device"
    makes: Tensors = ()
    reads: tuple[str, ...] = ()
    last_reads: Tensors = ()
    kernel: str = ""
    calls: int = 1
    sizes: tuple[int, ...] = ()
    reuse: Accesses = ()
    parts: tuple[Instruction, ...] = ()
    one_round: bool = False

    def __post_init__(self) -> None:
        if self.role == "start" and not self.stream:
            object.__setattr__(self, "stream", stream_of(self.axes))

    @property
    def alloc_bytes(self) -> float:
        """Device memory taken when it begins."""
        return sum(size for _, size in self.makes)

    @property
    def free_bytes(self) -> float:
        """Device memory given back when it ends."""
        return sum(size for _, size in self.last_reads)


def stream_of(axes: Axes) -> str:
    """The stream of collectives over some mesh axes.

    >>> stream_of(("dp", "tp"))
    'comm.dp.tp'
    """
    return ".".join(("comm", *axes))


def collective_name(start: str) -> str:
    """The name of the collective that a start begins.

    >>> collective_name("all_reduce_start_3")
    'all_reduce_3'
    """
    return start.replace("_start", "", 1)
