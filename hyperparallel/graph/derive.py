"""What became of a plan, as plain data: from a built program to a `Derived`.

No device and no process group is needed: the first rank's program is partitioned and its layouts and
collectives are read off. Where pieces are uneven the first rank holds the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from hyperparallel.cluster import Rates
from hyperparallel.graph.build import Built, build
from hyperparallel.graph.capture.batch_tree import call_of
from hyperparallel.graph.program import Transfer
from hyperparallel.plan.derived import BlockLayout, Communication, Derived, ParamLayout
from hyperparallel.plan.plan import Plan
from hyperparallel.shard.spec import Spec


def derive(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    loss: str | None = None,
    rates: Rates | None = None,
) -> Derived:
    """Every layout and collective that follows from a plan, for a model and an example of its global batch.

    batch: a mapping of keyword arguments, a tuple of positional ones, or one tensor. loss: see `build`. The
    model may be on the meta device. Raises `PlanError`/`LayoutError` for a plan that does not fit it and
    `CaptureError` for a module that cannot be captured.

    >>> import torch
    >>> from hyperparallel.layout import Mesh
    >>> found = derive(nn.Linear(4, 2), Plan(Mesh((2,), ("dp",))), torch.zeros(8, 4))
    >>> found.inputs["input"], [c.kind for c in found.communications]
    (Mesh((2,), ("dp",))("dp", None), ['all_reduce'])
    """
    args, kwargs = call_of(batch)
    return derived(build(model, plan, args, kwargs, loss=loss, rates=rates))


def derived(built: Built) -> Derived:
    """The record of a built program."""
    decisions, workload = built.decisions, built.workload
    program = built.rank_program(decisions.mesh.ranks[0])
    params = tuple(
        ParamLayout(
            name=name,
            shape=workload.values[value].shape,
            dtype=workload.values[value].dtype,
            stored=decisions.stored[name].layout(),
            used=decisions.used[name].layout(),
            declared=decisions.reasons[name].startswith("declared"),
            reason=decisions.reasons[name],
        )
        for name, value in workload.params.items()
    )
    return Derived(
        plan=decisions.plan.to_yaml(),
        params=params,
        inputs={path: spec.layout() for path, spec in program.input_specs.items()},
        outputs={path: spec.layout() for path, spec in program.output_specs.items()},
        communications=_communications(program.transfers(), built),
        values=_values(built),
        num_ranks=decisions.mesh.size,
        model_hash=built.model_hash,
        rewrites=tuple(program.rewrites),
    )


def _communications(transfers: Sequence[Transfer], built: Built) -> tuple[Communication, ...]:
    casts, params = built.workload.casts, built.workload.params
    names = {v: name for name, value in params.items() for v in (value, *casts[value])}
    grads = {value: name for name, value in built.workload.grads.items()}
    counted: Counter[Communication] = Counter()
    for t in transfers:
        # Small all-reduces travel together; their values stand in one text, separated by commas.
        value = ", ".join(
            names.get(v) or (f"grad of {grads[v]}" if v in grads else v) for v in t.value.split(", ")
        )
        phase: Literal["forward", "backward"] = "backward" if t.backward else "forward"
        counted[
            Communication(t.kind, t.axes, t.num_bytes, phase, value, t.module, t.reason, dtype=t.dtype)
        ] += 1
    return tuple(replace(one, count=count) for one, count in counted.items())


def _values(built: Built) -> tuple[BlockLayout, ...]:
    rows = []
    for op in built.workload.ops:
        _, outputs = built.decisions.operands[op.name]
        for value, spec in zip(op.outputs, outputs, strict=True):
            # The last result of a region is the token that ties its backward to it, no value of the model.
            token = op.layouts is not None and value == op.outputs[-1]
            if value is not None and spec is not None and not op.backward and not token:
                said = f"{op.target}, which declares it" if op.layouts else op.target
                rows.append(BlockLayout(op.module, said, value, spec.shape, _text(spec)))
    return tuple(rows)


def _text(spec: Spec) -> str:
    layout = spec.layout()
    return str(layout)[len(repr(layout.mesh)) :]
