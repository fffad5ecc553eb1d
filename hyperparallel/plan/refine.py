"""Split mesh axes that are larger than the number of heads they would cut."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hyperparallel.layout import Layout
from hyperparallel.plan.plan import Plan, match
from hyperparallel.shard.rule import Rule
from hyperparallel.workload import Workload


def refine(plan: Plan, workload: Workload, rules: Mapping[str, Rule]) -> Plan:
    """Split axes that are larger than a head count they share a factor with: tp=4 and 2 heads -> 2 x 2."""
    mesh = plan.mesh
    if any(op.layouts for op in workload.ops):
        return plan  # the user's own per-rank code calls axes by their names
    for axis in mesh.names:
        n = mesh.axis_size(axis)
        if axis in plan.batch_axes or n < 4:
            continue
        shared: Counter[int] = Counter()
        for op in workload.ops:
            rule = rules[op.name]
            for dims in (*rule.inputs, *(o for o in rule.outputs if o)):
                for factors in dims:
                    total = math.prod(rule.sizes[f] for f in factors)
                    common = math.gcd(rule.sizes[factors[0]], n) if len(factors) > 1 else n
                    if 1 < common < n and total % n == 0:
                        shared[common] += 1
        even = all(
            size % n == 0
            for name, (_, layout) in match(plan.params, workload.params, "params").items()
            for size, axes in zip(workload.values[workload.params[name]].shape, layout.dims, strict=False)
            if axis in axes
        )
        if shared and even:
            outer = min(shared)
            plan = _split_axis(plan, axis, (outer, n // outer))
    return plan


def _split_axis(plan: Plan, axis: str, sizes: tuple[int, int]) -> Plan:
    names = (f"{axis}_0", f"{axis}_1")
    mesh = plan.mesh.split(axis, dict(zip(names, sizes, strict=True)))

    def split(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        return {
            pattern: mesh(
                *(
                    tuple(part for name in dim for part in (names if name == axis else (name,)))
                    for dim in layout.dims
                )
            )
            for pattern, layout in layouts.items()
        }

    return replace(
        plan,
        mesh=mesh,
        params=split(plan.params),
        inputs=split(plan.inputs),
        activations=split(plan.activations),
        batch=plan.batch_axes,
    )
