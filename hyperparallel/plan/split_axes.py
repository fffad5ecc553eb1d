"""Split mesh axes that are larger than the number of heads they would cut.

A dim of heads x size can be cut by all ranks of an axis only if no head is torn: with 2 heads and 4 ranks the
axis becomes 2 x 2, its outer part cuts heads and its inner part holds the same ones (or cuts other tensors).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hyperparallel.layout import Layout
from hyperparallel.plan.plan import Plan, match
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.workload import Workload


def refine(plan: Plan, workload: Workload, rules: Mapping[str, Rule]) -> Plan:
    """Split axes that are larger than a head count they share a factor with: tp=4 and 2 heads -> 2 x 2."""
    if any(op.layouts for op in workload.ops):
        return plan  # the user's own per-rank code calls axes by their names
    mesh, merged, known = plan.mesh, _merged(workload, rules), workload.names_of_params()
    for axis in mesh.names:
        n = mesh.axis_size(axis)
        # 2 and 3 have no two parts to be split into; a batch axis cuts rows, which are no heads.
        if axis in plan.batch_axes or n < 4:
            continue
        # Only dims that the axis divides as a whole, and tears: others are cut or left as they are.
        shared = {math.gcd(outer, n) for outer, total in merged if total % n == 0} - {1, n}
        # Cut in 2 and those in 2 is cut in 4 only where pieces are even: a declared cut keeps its meaning.
        even = all(
            size % n == 0
            for name, (_, layout) in match(plan.params, known, "params").items()
            for size, axes in zip(workload.values[known[name]].shape, layout.dims, strict=False)
            if axis in axes
        )
        if shared and even:
            # The fewest heads: what has more of them is cut by both parts.
            outer = min(shared)
            plan = _split_axis(plan, axis, (outer, n // outer))
    return plan


def _merged(workload: Workload, rules: Mapping[str, Rule]) -> set[tuple[int, int]]:
    """(size of the outermost factor, size of all) of every dim that some op sees as a product.

    Products of the batch's rows and positions are left out: no axis but a batch axis is there to cut rows,
    and positions are cut inside their product as they are (`axis_states.inner_periods`).
    """
    found: set[tuple[int, int]] = set()
    places: dict[str, tuple[bool, ...]] = {}
    for value in workload.inputs.values():
        given = workload.values[value]
        places[value] = tuple(dim == 0 or "int" in given.dtype for dim in range(len(given.shape)))
    for op in workload.ops:
        rule = rules[op.name]
        # Followed through every op by the first factor of a dim: rows stay rows through views and products.
        rows = {
            factors[0]
            for value, dims in zip(op.inputs, rule.inputs, strict=True)
            for factors, is_place in zip(dims, places.get(value, ()), strict=False)
            if is_place and factors
        }
        for dims in (*rule.inputs, *(o for o in rule.outputs if o)):
            for factors in dims:
                if len(factors) > 1 and factors[0] not in rows:
                    found.add((rule.sizes[factors[0]], math.prod(rule.sizes[f] for f in factors)))
        for result, made in zip(op.outputs, rule.outputs, strict=True):
            if result and made:
                places[result] = tuple(bool(f) and f[0] in rows for f in made)
    return found


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
