"""From what the axes chose for an op to the specs of its operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hyperparallel.layout import Mesh
from hyperparallel.shard.axis_states import AxisState, Choice, Pending
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.spec import FactorCut, Spec, spec_of_dims


def factor_cuts(chosen: Sequence[tuple[str, Choice]]) -> dict[str, FactorCut]:
    """Factor -> who cuts it; chosen: (axis, choice) of one op, outermost axis first."""
    cuts: dict[str, FactorCut] = {}
    for axis, choice in chosen:
        if choice.factor is not None:
            before = cuts.get(choice.factor, FactorCut(()))
            if choice.period:
                inner = (*before.inner, axis)
                after = replace(before, inner=inner, period=choice.period)
            else:
                # One unit for all its axes: the coarsest, or some cut would tear an inner factor.
                unit = max(before.unit, choice.unit)
                after = replace(before, axes=(*before.axes, axis), unit=unit)
            cuts[choice.factor] = after
    return cuts


def operand_specs(
    mesh: Mesh, rule: Rule, chosen: Sequence[tuple[str, Choice]], cuts: Mapping[str, FactorCut]
) -> tuple[tuple[Spec, ...], tuple[Spec | None, ...]]:
    """(specs of an op's operands, specs of its results), cut by `cuts` and pending where choices say so."""

    def pending(places: list[tuple[str, AxisState | None]]) -> dict[str, str]:
        return {axis: place.op for axis, place in places if isinstance(place, Pending)}

    inputs = tuple(
        spec_of_dims(mesh, dims, rule.sizes, cuts, pending([(a, c.inputs[i]) for a, c in chosen]))
        for i, dims in enumerate(rule.inputs)
    )
    outputs = tuple(
        None
        if dims is None
        else spec_of_dims(mesh, dims, rule.sizes, cuts, pending([(a, c.outputs[i]) for a, c in chosen]))
        for i, dims in enumerate(rule.outputs)
    )
    return inputs, outputs
