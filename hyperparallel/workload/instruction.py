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


@dataclass(frozen=True)
class Instruction:
    """One line of a rank's program.

    kind: of an op what it is grouped under ("matmul", "elementwise"), of a collective its own. needs:
    positions of the instructions whose results it reads; a wait's first is its start. flops, num_bytes:
    arithmetic and memory traffic of an op, bytes received of a start. axes: mesh axes of a start. one_round:
    whether no message of it waits for another one.
    alloc_bytes, free_bytes: of tensors that it makes, and that die with it. kernel: the op's own name. calls:
    how many equal ones it stands for; parts: several kinds of them. sizes: m, n, k of a matrix product.
    reuse: what it touches, and how long after it was touched before.
    """

    name: str
    kind: str
    role: Literal["op", "start", "wait"] = "op"
    needs: tuple[int, ...] = ()
    flops: float = 0.0
    num_bytes: float = 0.0
    axes: Axes = ()
    dtype: str = "float32"
    alloc_bytes: float = 0.0
    free_bytes: float = 0.0
    kernel: str = ""
    calls: int = 1
    sizes: tuple[int, ...] = ()
    reuse: Accesses = ()
    parts: tuple[Instruction, ...] = ()
    one_round: bool = False

    @property
    def stream(self) -> str:
        """Where the collective of a start goes on."""
        return stream_of(self.axes)


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
