"""Ops whose layouts the user wrote: per-rank code inside the program, which is taken as it is.

Nothing is left to choose but one thing: where such an op takes a pending sum (the gradient of a result that
was whole), a whole value does as well, all of it on one rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hyperparallel.layout import Layout
from hyperparallel.shard.axis_states import WHOLE, AxisState, Choice, Cut, Pending
from hyperparallel.shard.spec import Spec, spec_of_layout
from hyperparallel.workload import Op, Workload

_MOST_FREE = 3
"""Operands that are free each for itself; more are all pending or all whole."""


def dim_place(workload: Workload, value: str, layout: Layout, axis: str) -> AxisState | None:
    """The cut that a layout makes on one axis; None if it makes none."""
    for dim, axes in enumerate(layout.dims):
        if axis in axes:
            before = math.prod(layout.mesh.axis_size(a) for a in axes[: axes.index(axis)])
            return Cut(dim, -(-workload.values[value].shape[dim] // before))
    return None


def written_choices(workload: Workload, axis: str) -> Mapping[str, Sequence[Choice]]:
    """By op, the choices on one axis that the written layouts leave."""
    found = {}
    for op in workload.ops:
        if op.layouts is None:
            continue
        taken, given = op.layouts

        def place(value: str, layout: Layout) -> AxisState:
            pending = dict(layout.partial).get(axis)
            cut = dim_place(workload, value, layout, axis)
            return cut or (Pending(pending) if pending else WHOLE)

        inputs = [place(value, layout) for value, layout in zip(op.inputs, taken, strict=True)]
        outputs = tuple(
            None if value is None else place(value, layout)
            for value, layout in zip(op.outputs, given, strict=True)
        )
        # What is taken pending may be whole: one rank hands it in and the others hand in nothing.
        free = [i for i, p in enumerate(inputs) if isinstance(p, Pending)]
        rows = list(itertools.product((True, False), repeat=len(free)))
        # 2^n choices would outgrow the program.
        if len(free) > _MOST_FREE:
            rows = [rows[0], rows[-1]]
        found[op.name] = [
            Choice(tuple(WHOLE if i in free and not row[free.index(i)] else p for i, p in enumerate(inputs)),
                   outputs, None)
            for row in rows
        ]  # fmt: skip
    return found


def written_specs(op: Op, workload: Workload) -> tuple[tuple[Spec, ...], tuple[Spec | None, ...]] | None:
    """What an op takes and gives by its written layouts; None for any other op."""
    if op.layouts is None:
        return None
    shapes = [None if v is None else workload.values[v].shape for v in (*op.inputs, *op.outputs)]
    specs = [
        None if shape is None else spec_of_layout(layout, shape)
        for layout, shape in zip((*op.layouts[0], *op.layouts[1]), shapes, strict=True)
    ]
    count = len(op.inputs)
    return tuple(spec for spec in specs[:count] if spec is not None), tuple(specs[count:])


def region_of(workload: Workload, name: str, used: Spec) -> str:
    """The op with written layouts that takes a parameter as it is laid out; "" if there is none."""
    value = workload.params[name]
    for op in workload.consumers[value]:
        if op.layouts is not None:
            layout = op.layouts[0][op.inputs.index(value)]
            if spec_of_layout(layout, used.shape) == used:
                return op.target.split(".")[1]
    return ""
