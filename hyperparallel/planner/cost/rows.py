"""Steps to be priced, flattened: every matrix product and message of every row in a few long arrays.

A row is one (model, cluster, batch, strategy). Products and messages belong to segments (one kind of layer,
one pass), segments to rows. Flattening is done once; pricing under other constants (`price.py`) is then a few
vector operations over all rows, which is what makes fitting to a thousand published steps take seconds, and
a search over fifty thousand strategies one second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hyperparallel.cluster.axis_links import FILLS, Placed, placed
from hyperparallel.cluster.cluster import Cluster
from hyperparallel.planner.cost.collectives import PRICED_KINDS, GroupArrays, groups_of
from hyperparallel.planner.cost.shapes import Places, spread
from hyperparallel.planner.cost.work import Amount, Array, PassWork
from hyperparallel.planner.strategy import DTYPES, ORDERS, Candidates

FORWARD, BACKWARD, AGAIN, HEAD, FRONT = range(5)

PRODUCT_COLUMNS = tuple(
    f"product_{x}"
    for x in ("segment", "m", "n", "k", "copies", "attention", "low", "scaled", "slower")
)
MESSAGE_COLUMNS = tuple(f"message_{x}" for x in ("segment", "kind", "bytes", "count", "hidden", "copies"))
CELL_COLUMNS = tuple(f"cell_{x}" for x in ("launches", "expert_launches", "stream", "permuted"))
SEGMENT_COLUMNS = ("segment_layers", "segment_gather")


@dataclass
class Rows:
    """The flat arrays. Columns named `segment`, `cell` and `row` point into the tables of those.

    A cell is a segment of one layer shape (`shapes.py`), shared by all rows of that shape.

    product_*: one entry per product and cell: m, n, k, copies, attention, low, scaled (0 or 1), slower.
    message_*: kind (in `PRICED_KINDS`), bytes, count, hidden, copies, and its group; `segment`: the cell.
    cell_*: a row of that shape, launches, those for experts, stream bytes, permuted bytes.
    segment_*: cell, row, pass, layers (how many such layers the whole model has), gather (bytes per layer
    that ZeRO-3 gathers or scatters).
    row fields: see `build.py`, which fills them.
    """

    product_segment: Array
    product_m: Array
    product_n: Array
    product_k: Array
    product_copies: Array
    product_attention: Array
    product_low: Array
    product_scaled: Array
    product_slower: Array
    message_segment: Array
    message_kind: Array
    message_bytes: Array
    message_count: Array
    message_hidden: Array
    message_copies: Array
    message_groups: GroupArrays
    cell_row: Array
    cell_launches: Array
    cell_expert_launches: Array
    cell_stream: Array
    cell_permuted: Array
    segment_cell: Array
    segment_row: Array
    segment_pass: Array
    segment_layers: Array
    segment_gather: Array
    row: dict[str, Array]
    groups: dict[str, GroupArrays]

    @property
    def length(self) -> int:
        return len(self.row["pp"])

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """One table of all rows, in order."""
        cells = np.cumsum([0] + [len(p.cell_row) for p in parts])
        starts = np.cumsum([0] + [p.length for p in parts])
        values: dict[str, Any] = {}
        for f in fields(cls):
            columns = [getattr(p, f.name) for p in parts]
            if f.name in ("product_segment", "message_segment", "segment_cell"):
                columns = [c + s for c, s in zip(columns, cells, strict=False)]
            elif f.name in ("segment_row", "cell_row"):
                columns = [c + s for c, s in zip(columns, starts, strict=False)]
            if f.name == "row":
                values["row"] = {k: np.concatenate([c[k] for c in columns]) for k in columns[0]}
            elif f.name == "groups":
                values["groups"] = {k: _join_groups([c[k] for c in columns]) for k in columns[0]}
            elif f.name == "message_groups":
                values[f.name] = _join_groups(columns)
            else:
                values[f.name] = np.concatenate(columns)
        return cls(**values)


def _join_groups(parts: Sequence[GroupArrays]) -> GroupArrays:
    return GroupArrays(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(GroupArrays)))


@dataclass
class LayerPass:
    """One pass over one kind of layer, before flattening."""

    work: PassWork
    which: int
    layers: Amount
    gather_bytes: Amount = 0.0


def candidate_rows(
    segments: Sequence[LayerPass],
    candidates: Candidates,
    cluster: Cluster,
    row: dict[str, Amount],
    first: Places,
    shape: Places,
) -> Rows:
    """The rows of one model on one cluster, one per candidate. segments: their work over the shapes, their
    bytes to gather over the candidates. first, shape: see `shapes.distinct`."""
    count = len(first)
    ones = np.ones(count)
    products: list[list[Any]] = [[] for _ in range(9)]
    messages: list[list[Any]] = [[] for _ in range(7)]
    axes = _groups(cluster, candidates.take(first))
    for index, segment in enumerate(segments):
        place = np.arange(count) + index * count
        for p in segment.work.products:
            for column, value in zip(
                products,
                (place, p.m, p.n, p.k, p.copies, p.attention, p.low, p.scaled, p.slower),
                strict=True,
            ):
                column.append(spread(value, count))
        for m in segment.work.messages:
            # Messages to nobody are left out: most rows have several axes of one rank.
            used = (spread(m.times, count) * (axes[m.axis].size > 1)).nonzero()[0]
            entries = (place, PRICED_KINDS.index(m.kind) * ones, m.num_bytes, m.times, m.hidden, m.copies)
            for column, value in zip(messages[:6], entries, strict=True):
                column.append(spread(value, count)[used])
            messages[6].append(axes[m.axis].take(used))
    flat = [np.concatenate(c) if c else np.zeros(0) for c in products]
    sent = [np.concatenate(c) if c else np.zeros(0) for c in messages[:6]]
    groups = _join_groups(messages[6]) if messages[6] else axes["tp"].take(np.zeros(0, int))
    works = [s.work for s in segments]
    cells = [
        np.concatenate([spread(value, count) for value in column])
        for column in zip(
            *((w.launches, w.expert_launches, w.stream_bytes, w.permuted_bytes) for w in works), strict=True
        )
    ]
    total = len(candidates)
    table = [
        np.concatenate([spread(value, total) for value in column])
        for column in zip(*((s.layers, s.gather_bytes) for s in segments), strict=True)
    ]
    # A product made no times (attention in its other form, nothing recomputed) would be priced in vain.
    keep = flat[4] > 0
    flat = [c[keep] for c in flat]
    flat[0], sent[0] = flat[0].astype(int), sent[0].astype(int)
    device = cluster.device
    facts: dict[str, Amount] = {
        "peak": np.array([device.peak_flop_s.get(d, 0.0) for d in DTYPES])[candidates.dtype.astype(int)],
        "peak16": device.peak_flop_s.get(
            "bf16", device.peak_flop_s.get("fp16", max(device.peak_flop_s.values()))
        ),
        "memory_bytes_s": device.memory_bytes_s,
        "launch": device.launch_s,
        "units": device.units,
        "gemm": device.gemm.peak,
        "half_k": device.gemm.half_k,
        "vendor_attention": device.gemm.attention,
        "open_attention": device.gemm.open_attention,
        "tile_m": device.gemm.tile_m,
        "tile_n": device.gemm.tile_n,
        "host_s_byte": _host_seconds(cluster),
        "taken": device.collective_units / device.units + device.comm_slowdown - 1.0,
    }
    facts |= {
        name: getattr(candidates, name) for name in ("tp", "pp", "dp", "cp", "virtual", "zero", "schedule")
    }
    facts |= {
        "overlap": candidates.overlap,
        "graph": candidates.graph,
        "attention": candidates.attention,
        "experts": candidates.experts,
        "overlap_experts": candidates.overlap_experts,
        "etp": candidates.etp,
        "ep": candidates.ep,
    }
    columns: dict[str, Any] = dict(zip(PRODUCT_COLUMNS, flat, strict=True))
    columns |= dict(zip(MESSAGE_COLUMNS, sent, strict=True))
    columns |= dict(zip(CELL_COLUMNS, cells, strict=True))
    columns |= dict(zip(SEGMENT_COLUMNS, table, strict=True))
    return Rows(
        **columns,
        message_groups=groups,
        cell_row=np.tile(first, len(segments)),
        segment_cell=np.concatenate([shape + index * count for index in range(len(segments))]),
        segment_row=np.tile(np.arange(total), len(segments)),
        segment_pass=np.repeat([s.which for s in segments], total),
        row={name: spread(value, total) for name, value in (facts | row).items()},
        groups=_groups(cluster, candidates),
    )


def _host_seconds(cluster: Cluster) -> float:
    """Of a byte that comes from host memory and goes back while all devices do so; 0 without that tier."""
    if not cluster.has_tier("host"):
        return 0.0
    read, write = cluster.tier("host").contended()
    return 1.0 / read + 1.0 / write


def axes_placed(cluster: Cluster, c: Candidates) -> dict[str, Placed]:
    """Where every axis lies ([dims, C] of each), in each candidate's own order and fill.

    Experts fold over what the pipeline leaves of every dimension (tp, cp and dp): etp innermost, then ep,
    then their replicas ("edp").
    """
    shape = (len(cluster.dims) or 1, len(c))
    found = {
        axis: Placed(np.ones(shape, np.int64), np.ones(shape, np.int64))
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
    }
    code = (c.order * len(FILLS) + c.fill).astype(int)
    for one in np.unique(code):
        at = np.flatnonzero(code == one)
        order, fill = ORDERS[one // len(FILLS)].split("-"), FILLS[one % len(FILLS)]
        size = {axis: getattr(c, axis)[at].astype(np.int64) for axis in (*order, "etp", "ep")}
        main = placed(cluster, [size[axis] for axis in order], fill)
        pipeline = main.members[order.index("pp")]
        # Experts fold into what the pipeline leaves, whatever order tp, cp and dp stand in.
        room = np.maximum(np.array(cluster.dims or (1,))[:, None] // pipeline, 1)
        replicas = size["tp"] * size["cp"] * size["dp"] // (size["etp"] * size["ep"])
        folded = placed(cluster, [size["etp"], size["ep"], replicas], fill, room)
        for names, those in ((order, main), (("etp", "ep", "edp"), folded)):
            for i, axis in enumerate(names):
                found[axis].members[:, at], found[axis].strides[:, at] = those.members[i], those.strides[i]
    return found


def _groups(cluster: Cluster, c: Candidates) -> dict[str, GroupArrays]:
    """The groups of every axis; "dp" is what gradients are reduced over (dp * cp), "edp" that of experts."""
    where = axes_placed(cluster, c)
    cp, dp = where["cp"], where["dp"]
    far = np.iinfo(np.int64).max
    # Gradients go over cp and dp at once: links interleave as those of the nearer axis do.
    closest = np.minimum(np.where(cp.members > 1, cp.strides, far), np.where(dp.members > 1, dp.strides, far))
    where["dp"] = Placed(cp.members * dp.members, np.where(closest < far, closest, 1))
    return {
        axis: groups_of(cluster, one.members.T.astype(float), one.strides.T.astype(float))
        for axis, one in where.items()
    }
