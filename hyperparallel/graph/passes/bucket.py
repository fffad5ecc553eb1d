"""Join small all-reduces that can travel together into one.

Two all-reduces over the same axes, of the same reduction and dtype, can share one message if neither
depends on the other and nothing waits for the first before the second can start. An all-reduce whose
result is only needed at the end (a loss, a norm's gradient) thus rides with a later one. Only small ones
are joined: a message pays its latency once, but packing and unpacking touch the bytes twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.program import RankProgram

aten = torch.ops.aten


@dataclass
class _Bucket:
    """All-reduces that will travel together, the last one's place in the order."""

    starts: list[fx.Node]
    num_bytes: int


def bucket(program: RankProgram, largest_bytes: int = 1 << 18) -> RankProgram:
    """Join all-reduces of up to `largest_bytes` each, in place; every rank joins the same ones."""
    graph = program.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    open_buckets: dict[Any, _Bucket] = {}
    done: list[_Bucket] = []
    for node in list(graph.nodes):
        if not _joinable(node, largest_bytes):
            continue
        phase = not program.joint and node.meta["backward"]
        key = (node.args[1], node.args[2], node.meta.get("dtype"), node.meta["constant"], phase)
        current = open_buckets.get(key)
        if current and _may_join(current, node, order, largest_bytes):
            current.starts.append(node)
            current.num_bytes += _bytes(node)
        else:
            if current:
                done.append(current)
            open_buckets[key] = _Bucket([node], _bytes(node))
    for found in (*done, *open_buckets.values()):
        if len(found.starts) > 1:
            _join(graph, found.starts)
    return program


def _joinable(node: fx.Node, largest_bytes: int) -> bool:
    return (
        node.target is communication.all_reduce_start
        and "shape" in node.meta
        and _bytes(node) <= largest_bytes
    )


def _bytes(node: fx.Node) -> int:
    """What the fullest rank moves: pieces may be uneven, but every rank must join the same starts."""
    moved: int = node.meta["transfer"].num_bytes
    return moved


def _first_use(start: fx.Node, order: dict[fx.Node, int]) -> float:
    """Where the result of a start is first needed (infinite: only at the end)."""
    (wait,) = start.users
    return min((order[u] if u.op != "output" else math.inf for u in wait.users), default=math.inf)


def _may_join(found: _Bucket, node: fx.Node, order: dict[fx.Node, int], largest_bytes: int) -> bool:
    if found.num_bytes + _bytes(node) > largest_bytes:
        return False
    source = node.all_input_nodes[0]
    return all(_first_use(start, order) > order[source] for start in found.starts)


def _join(graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
    """Replace the starts by one over their concatenation, placed where the last one stood."""
    last = starts[-1]
    sources = [start.args[0] for start in starts]
    shapes = [list(start.meta["shape"]) for start in starts]
    counts = [math.prod(shape) for shape in shapes]
    with graph.inserting_before(last):
        flat = [_call(graph, last, aten.reshape.default, source, [-1]) for source in sources]
        packed = _call(graph, last, aten.cat.default, flat)
        joined = _call(graph, last, communication.all_reduce_start, packed, last.args[1], last.args[2])
        transfer = last.meta["transfer"]
        moved = sum(start.meta["transfer"].num_bytes for start in starts)
        names = ", ".join(start.meta["transfer"].value for start in starts)
        joined.meta["transfer"] = replace(transfer, num_bytes=moved, value=names)
        joined.meta.update(shape=[sum(counts)], itemsize=last.meta["itemsize"], dtype=last.meta["dtype"])
        waited = _call(graph, last, communication.wait, joined)
        offset = 0
        for start, shape, count in zip(starts, shapes, counts, strict=True):
            part = _call(graph, last, aten.slice.Tensor, waited, 0, offset, offset + count)
            view = _call(graph, last, aten.view.default, part, shape)
            offset += count
            (wait,) = start.users
            wait.replace_all_uses_with(view)
            graph.erase_node(wait)
            graph.erase_node(start)


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta.update({k: like.meta[k] for k in ("backward", "module", "constant")})
    return node
