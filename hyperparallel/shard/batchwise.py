"""How a loss depends on the rows of a batch, so that the losses of micro-batches can be put together.

A forward walk over the program follows the batch's rows through every op's rule, as a cut would be followed:
a value has rows still, or is a sum or a mean over them, or depends on them in a way that this file can't
tell. What a loss is decides how micro-batches weigh: sums add up, means are averaged by how many rows (or
labels) each is a mean of. Ratios of two sums and weighted means have denominators of their own: unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

from hyperparallel.shard.axis_states import WHOLE, Choice, Cut, Pending, choices
from hyperparallel.shard.rules.loss import MEAN
from hyperparallel.shard.rules.operands import argument
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import facts_of
from hyperparallel.workload import Op, Ref, Workload

FIXED, ROWS, OVER_SUM, OVER_ROWS, OVER_LABELS, UNKNOWN = "fixed", "rows", "sum", "mean", "labels", "unknown"
"""Not of the batch; of rows lost sight of; a sum; a mean by rows; a mean by valid labels; not known."""

BatchState = Cut | str


def over_rows(work: Workload, rules: Mapping[str, Rule], value: str) -> str:
    """What `value` is over the rows of the batch: "sum", "mean", "labels" (a mean over labels), "unknown".

    The rows are dim 0 of the inputs that have as many as the first; with one row nothing can be told.
    """
    inputs = [work.values[v] for v in work.inputs.values()]
    rows = next((x.shape[0] for x in inputs if x.shape), 1)
    by_row = [x.name for x in inputs if x.shape[:1] == (rows,) and rows > 1]
    states: dict[str, BatchState] = {name: Cut(0, rows) for name in by_row}
    for op in work.ops:
        # The loss is made in the forward; what is not of the batch stays fixed.
        if op.backward or all(states.get(v, FIXED) == FIXED for v in op.inputs):
            continue
        found = [states.get(v, FIXED) for v in op.inputs]
        for output, state in zip(op.outputs, _made(op, rules[op.name], found, rows), strict=True):
            if output is not None:
                # A tensor whose rows were lost sight of (a mask) may join others that have them; a scalar
                # that is no known sum or mean spoils what it joins.
                states[output] = ROWS if state == UNKNOWN and work.values[output].numel > 1 else state
    state = states.get(value, UNKNOWN)
    return str(state) if state in (OVER_SUM, OVER_ROWS, OVER_LABELS) else UNKNOWN


def _made(op: Op, rule: Rule, found: list[BatchState], rows: int) -> list[BatchState]:
    reduced: set[BatchState] = {state for state in found if state in (OVER_SUM, OVER_ROWS, OVER_LABELS)}
    if reduced:
        return [_passed(op, rule, found, reduced, rows)] * len(op.outputs)
    # An axis of one rank cuts nothing off: its placements only tell where the rows went.
    fits = (c for c in choices(rule, {}, 1) if c.factor is not None and _fits(c, found))
    choice = next(fits, None)
    if choice is None or UNKNOWN in found:
        return [UNKNOWN] * len(op.outputs)
    return [_place(op, choice, i) for i in range(len(op.outputs))]


def _fits(choice: Choice, found: list[BatchState]) -> bool:
    """Whether a choice takes the rows as they come; what is fixed or lost sight of may be cut or not."""
    places = zip(found, choice.inputs, strict=True)
    return all(place == state for state, place in places if isinstance(state, Cut)) and any(
        isinstance(state, Cut) for state in found
    )


def _place(op: Op, choice: Choice, i: int) -> BatchState:
    place, facts = choice.outputs[i], facts_of(op.target)
    if isinstance(place, Cut):
        return place
    at = facts.reduction_at
    mean = facts.averages or (at is not None and argument(op, at, "reduction", MEAN) == MEAN)
    if place == WHOLE and facts.weight_at is not None:
        weighted = isinstance(argument(op, facts.weight_at, "weight"), Ref)
        return UNKNOWN if mean and weighted else OVER_LABELS if mean and i == 0 else OVER_SUM
    if place == Pending("sum"):
        return OVER_ROWS if mean else OVER_SUM
    return UNKNOWN


def _passed(op: Op, rule: Rule, found: list[BatchState], reduced: set[BatchState], rows: int) -> BatchState:
    """A sum or a mean through one more op: what is linear in it leaves it what it is."""
    there = {i for i, state in enumerate(found) if state != FIXED}
    if len(reduced) > 1 or any(found[i] not in reduced for i in there):
        return UNKNOWN
    (state,) = reduced
    groups = [group for group in rule.linear if there <= set(group)]
    # The mean of (a + constant) is the mean of a + constant; of sums this holds for none but all.
    if not groups or (state == OVER_SUM and all(set(group) != there for group in groups)):
        return UNKNOWN
    scales = facts_of(op.target).scales
    numbers = [abs(a) for a in op.args if isinstance(a, (int, float)) and a] if scales else []
    # Scaled by a number of rows a sum may be a mean made by hand, which weighs otherwise among micro-batches.
    by_rows = any(n != 1 and (_divides(rows, n) or _divides(rows, 1 / n)) for n in numbers)
    return UNKNOWN if state == OVER_SUM and by_rows else state


def _divides(rows: int, number: float) -> bool:
    """Whether a number may be a count of rows, so that a sum over them divided by it is a mean."""
    return number >= 1 and abs(number / rows - round(number / rows)) < 1e-6 and round(number / rows) > 0
