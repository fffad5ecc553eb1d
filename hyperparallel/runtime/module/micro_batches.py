"""Accumulation: a batch in micro-batches, what each one's loss weighs, and sums of their gradients.

What a loss is over the rows, `shard.batchwise` reads off the program: sums add up, means weigh by rows, or
by valid labels, so that the result is that of the whole batch. Sums of gradients over ranks wait for the
last micro-batch, except over an axis that keeps gradients cut (fsdp, zero >= 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyperparallel.errors import PlanError
from hyperparallel.graph.build import Built
from hyperparallel.graph.capture.batch_tree import call_of, flatten
from hyperparallel.graph.program import RankProgram
from hyperparallel.runtime.exec.codegen import WaitClock
from hyperparallel.runtime.exec.compiled import Compiled
from hyperparallel.runtime.job.here import Here
from hyperparallel.shard.batchwise import over_rows
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.spec import Spec
from hyperparallel.workload import Workload

IGNORED_LABEL = -100


def check_accumulation(accumulate: int, reduction: str | None) -> None:
    """Refuse impossible values of the arguments that front doors share."""
    if type(accumulate) is not int or accumulate < 1:
        raise PlanError("accumulate", accumulate, "1 or more micro-batches")
    if reduction not in (None, "mean", "sum"):
        raise PlanError("reduction", reduction, "mean, sum, or None: read it off the program")


def split_batch(batch: Any, parts: int) -> list[Any]:
    """The micro-batches of a batch: every tensor with the batch's rows is cut along dim 0.

    The pieces differ by at most one row. Raises `PlanError` for more parts than rows.

    >>> [b["x"].shape[0] for b in split_batch({"x": torch.zeros(7, 2)}, 4)]
    [2, 2, 2, 1]
    """
    if parts == 1:
        return [batch]
    tree, leaves = flatten(batch)
    rows = batch_rows(batch)
    if not 1 <= parts <= rows:
        raise PlanError("accumulate", parts, f"1 to the {rows} rows of the batch")
    cuts = [x.tensor_split(parts) if x.dim() and x.shape[0] == rows else (x,) * parts for x in leaves]
    return [tree.rebuild(iter([cut[i] for cut in cuts])) for i in range(parts)]


def batch_rows(batch: Any) -> int:
    """The rows of a batch: dim 0 of its first tensor that has dims."""
    return next((x.shape[0] for x in flatten(batch)[1] if x.dim()), 0)


def micro_weights(micros: Sequence[Any], over: str = "labels", shifted: bool = True) -> list[float]:
    """The weight of each micro-batch's loss in that of the batch.

    over: "sum"; "mean" for a mean over rows; "labels" for one over valid labels, or rows where there are
    none. shifted: labels of the first position are not used, as in next-token prediction.
    """
    if len(micros) == 1 or over == "sum":
        return [1.0] * len(micros)
    counts = [_count(micro, shifted) if over == "labels" else max(batch_rows(micro), 1) for micro in micros]
    return [count / sum(counts) if any(counts) else 1 / len(counts) for count in counts]


def _count(micro: Any, shifted: bool) -> int:
    labels = call_of(micro)[1].get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        used = labels[..., 1:] if shifted and labels.dim() > 1 else labels
        return int((used != IGNORED_LABEL).sum())
    return max(batch_rows(micro), 1)


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model predicts the next token; Hugging Face models say so (transformers 5)."""
    return "CausalLM" in (getattr(model, "loss_type", None) or "CausalLM")


def loss_over_rows(
    reduction: str | None,
    accumulate: int,
    batch: Any,
    work: tuple[Workload, Mapping[str, Rule]],
    of_more_rows: Callable[[Any], tuple[Workload, Mapping[str, Rule]]],
) -> str:
    """What a loss is over the rows of a batch: "sum", "mean" or "labels" (see `micro_weights`).

    reduction: what the user said. work: the program of a micro-batch and its rules. of_more_rows: makes that
    of another batch, since of one row nothing can be told. Raises `PlanError` where it is neither.
    """
    if reduction is not None or accumulate == 1:
        return "sum" if reduction == "sum" else "labels" if reduction else "mean"
    count = batch_rows(batch)
    if count < 2 * accumulate:
        work = of_more_rows(split_batch(batch, max(count // 2, 1))[0])
    (value,) = work[0].outputs.values()
    found = over_rows(*work, value)
    if found == "unknown":
        kind = "not known as a sum or a mean over the batch's rows"
        raise PlanError("loss", kind, "reduction='mean' or 'sum' with accumulate > 1, or accumulate=1")
    return found


class GradientReduction:
    """Takes the gradients of one program to the layouts their parameters are stored in.

    layouts: in which the program leaves them: pending where it was written with `defer`. last: what is to be
    run then; None where nothing is pending. clock: counts the waits, as those of the program.
    """

    def __init__(self, built: Built, program: RankProgram, here: Here, clock: WaitClock) -> None:
        self.layouts = tuple(program.grad_specs.values())
        self.last: Compiled | None = None
        if any(spec.partial for spec in self.layouts):
            last = built.reduction_program(program)
            self.last = Compiled(last, here.binder(built.decisions.mesh, last), clock=clock)

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        if self.last is None:
            return list(grads)
        names = self.last.program.inputs.values()
        return list(self.last.run("joint", dict(zip(names, grads, strict=True))))


class GradientSums:
    """Gradients added up over micro-batches; one of another size may leave its in other layouts."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Spec, ...], tuple[GradientReduction, list[Tensor]]] = {}

    def add(self, reduction: GradientReduction, grads: list[Tensor]) -> None:
        """Add what one program made; `reduction` is that of the program."""
        layouts = reduction.layouts
        if not grads:  # a part that trains nothing
            return
        if layouts in self._totals:
            # In place: a program hands out gradients that are nobody else's.
            torch._foreach_add_(self._totals[layouts][1], grads)
        else:
            self._totals[layouts] = reduction, grads

    def finished(self) -> list[Tensor]:
        """The sums, in the layouts their parameters are stored in."""
        finished = [reduction(total) for reduction, total in self._totals.values()]
        for other in finished[1:]:
            torch._foreach_add_(finished[0], other)
        return finished[0] if finished else []
