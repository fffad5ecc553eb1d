"""Join all-reduces that can travel together into one collective.

Two over the same axes, of the same reduction and dtype, can share one message if neither depends on the
other. The message goes when the last of its tensors is made, so tensors join in the order in which they
are made. How large a message gets depends on who waits for it:

- Gradients (and a loss) are only handed out. N bytes of them in messages of b bytes pay N / b latencies,
  and the last message, made when the backward ends, is hidden behind nothing: N / b * latency + b / bandwidth
  is least for b = sqrt(N * latency * bandwidth) (`Rates.message_bytes`).
- What the program itself waits for is joined while it is small: a large one is better on its way early.

What is only handed out rides with a small one that goes anyway. Whether the tensors are packed is the
transport's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.pairs import is_handed_out, join_starts, origin
from hyperparallel.graph.program import RankProgram

SMALL_BYTES = 1 << 18
"""A message of this size that the program waits for takes well over its latency on any link."""


@dataclass
class _Bucket:
    """All-reduces that will travel together. first_use: where in the order a result of them is first needed
    (infinite: only at the end)."""

    starts: list[fx.Node] = field(default_factory=list)
    num_bytes: int = 0
    first_use: float = math.inf

    def add(self, start: fx.Node, first_use: float) -> None:
        self.starts.append(start)
        self.num_bytes += _bytes(start)
        self.first_use = min(self.first_use, first_use)


def bucket(program: RankProgram) -> RankProgram:
    """Join all-reduces in place; every rank joins the same ones."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    alike: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.target is communication.all_reduce_start and "dtype" in node.meta:
            # Where forward and backward run apart, one message can't hold tensors of both.
            phase = not program.joint and node.meta["backward"]
            key = (node.args[1], node.args[2], node.meta["dtype"], node.meta["constant"], phase)
            alike.setdefault(key, []).append(node)
    for (_, axes, *_), starts in alike.items():
        # By when operands are made, not by where the starts stand: a message waits for its last operand.
        starts.sort(key=lambda start: order[origin(start.all_input_nodes[0])])
        total = sum(_bytes(start) for start in starts if is_handed_out(start))
        for one in _buckets(starts, order, program.rates.message_bytes(axes, total)):
            if len(one.starts) > 1:
                modules = {start.meta["module"] for start in one.starts}
                # Where all operands exist; `starts` is sorted by operands, so its last may stand earlier.
                last = max(one.starts, key=order.__getitem__)
                join_starts(program.graph, one.starts, last, modules.pop() if len(modules) == 1 else "")
    return program


def _buckets(starts: Sequence[fx.Node], order: dict[fx.Node, int], most: float) -> Iterable[_Bucket]:
    """Starts dealt into buckets, in the order in which their operands are made.

    most: bytes of a bucket that is only handed out.
    """
    waited_for, handed_out = _Bucket(), _Bucket()
    done = []
    for start in starts:
        made, size = order[origin(start.all_input_nodes[0])], _bytes(start)
        # Made before the first use: else the message would wait for what itself makes possible (a deadlock).
        fits = waited_for.num_bytes + size <= SMALL_BYTES and made < waited_for.first_use
        if is_handed_out(start):
            if waited_for.starts and fits:
                waited_for.add(start, math.inf)
                continue
            # Empty buckets may come out of this: `bucket` joins none of fewer than two.
            if handed_out.num_bytes + size > most:
                done.append(handed_out)
                handed_out = _Bucket()
            handed_out.add(start, math.inf)
            continue
        if not fits:
            done.append(waited_for)
            waited_for = _Bucket()
            if handed_out.num_bytes + size <= SMALL_BYTES:  # rides with what goes anyway
                waited_for, handed_out = handed_out, _Bucket()
        waited_for.add(start, min(order[user] for user in _readers(start)))
    return [*done, waited_for, handed_out]


def _bytes(node: fx.Node) -> int:
    """What the fullest rank moves: pieces may be uneven, but every rank must join the same starts."""
    moved: int = node.meta["transfer"].num_bytes
    return moved


def _readers(start: fx.Node) -> list[fx.Node]:
    (wait,) = start.users
    return [user for user in wait.users if user.op != "output"]
