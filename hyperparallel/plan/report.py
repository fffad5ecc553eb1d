"""What was derived, as rows: parameters and collectives, with repeated blocks folded into one row.

The text report, the command line's tables and the HTML page all print these rows, so they cannot
disagree. A row stands for parameters (or collectives) that differ only in the index of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from hyperparallel.plan.derived import Communication, Derived, ParamLayout, Phase
from hyperparallel.plan.plan import Plan
from hyperparallel.plan.wording import (
    REPLICATED,
    axes_words,
    bytes_words,
    fold,
    folded_name,
    layout_words,
    mesh_words,
)
from hyperparallel.shard.op_seconds import SMALL_FLOATS

T = TypeVar("T")
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


@dataclass(frozen=True)
class ParameterRow:
    """Parameters laid out alike. `rank_bytes` is the sum over them that one rank stores."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stored: str
    used: str
    declared: bool
    reason: str
    rank_bytes: int

    @property
    def title(self) -> str:
        """One name for all, `model.layers.*.mlp.up_proj.weight [x8]`."""
        return folded_name(self.names)

    @property
    def layout(self) -> str:
        """Stored layout, and the one at use where it differs."""
        return self.stored if self.used == self.stored else f"{self.stored}; at use {self.used}"


@dataclass(frozen=True)
class CommunicationRow:
    """Collectives of one kind, axes, dtype and phase for one place of the model, over one step."""

    kind: str
    axes: tuple[str, ...]
    phase: Phase
    module: str
    values: tuple[str, ...]
    reason: str
    count: int
    step_bytes: int
    dtype: str

    @property
    def where(self) -> str:
        """The module, or what moves where that is of several: each name once, at most three."""
        if self.module:
            return self.module
        names = list(dict.fromkeys(name for value in self.values for name in value.split(", ")))
        more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
        return ", ".join([*names[:3], *more])


def parameter_rows(derived: Derived) -> list[ParameterRow]:
    """Parameters in the model's order, repeated blocks folded."""

    def key(param: ParamLayout) -> Hashable:
        why = (param.declared, fold(param.reason))
        return fold(param.name), param.shape, param.dtype, param.stored, param.used, why

    return [
        ParameterRow(
            names=tuple(param.name for param in group),
            shape=group[0].shape,
            stored=layout_words(group[0].stored),
            used=layout_words(group[0].used),
            declared=group[0].declared,
            reason=group[0].reason if len(group) == 1 else fold(group[0].reason),
            rank_bytes=sum(param.rank_bytes for param in group),
        )
        for group in _grouped(derived.params, key)
    ]


def communication_rows(derived: Derived, *, by_module: bool = True) -> list[CommunicationRow]:
    """Collectives by phase, kind, axes and dtype; `by_module=False` adds up over the model."""

    def key(item: Communication) -> Hashable:
        place = (fold(item.module), fold(item.reason)) if by_module else None
        return item.kind, item.axes, item.dtype, place

    return [
        CommunicationRow(
            kind=group[0].kind,
            axes=group[0].axes,
            phase=phase,
            module=fold(group[0].module) if by_module else "",
            values=tuple(dict.fromkeys(fold(item.value) for item in group)),
            reason=fold(group[0].reason) if by_module else "",
            count=sum(item.count for item in group),
            step_bytes=sum(item.step_bytes for item in group),
            dtype=group[0].dtype,
        )
        for phase in PHASES
        for group in _grouped((c for c in derived.communications if c.phase == phase), key)
    ]


def layout_names(derived: Derived) -> list[str]:
    """Every distinct layout of a parameter in words, most used first; replicated ones last."""
    used: dict[str, int] = {}
    for param in derived.params:
        words = layout_words(param.stored)
        used[words] = used.get(words, 0) + param.num_elements
    return sorted(used, key=lambda words: (words == REPLICATED, -used[words]))


def text_report(derived: Derived) -> str:
    """The plan in words: layouts of parameters and batch, then collectives with bytes per step."""
    lines = [derived.summary(), f"plan {derived.plan_hash}, model {derived.model_hash}"]
    lines += [*precision_lines(derived), *mesh_lines(derived), ""]
    rows = parameter_rows(derived)
    width = max((len(row.title) for row in rows), default=0)
    lines.append("parameters (* = declared by the plan, the rest follows)")
    for row in rows:
        mark = "*" if row.declared else " "
        lines.append(f"{mark} {row.title:<{width}}  {row.layout}  ({bytes_words(row.rank_bytes)})")
    for title, layouts in (("batch", derived.inputs), ("results", derived.outputs)):
        if layouts:
            lines += ["", title]
            lines += [f"  {name}: {layout_words(layout)}" for name, layout in layouts.items()]
    return "\n".join([*lines, "", *communication_lines(derived), "", *derived.rewrite_lines()])


def communication_lines(derived: Derived) -> list[str]:
    """The collectives of a step, one line per phase, kind, axes and place."""
    rows = communication_rows(derived)
    if not rows:
        return ["collectives per step: none"]
    lines = ["collectives per step (bytes are what one rank receives)"]
    for row in rows:
        what = f"{row.count:>4} x {row.kind} over {axes_words(row.axes)}"
        lines.append(
            f"  {row.phase:<8} {what:<32} {bytes_words(row.step_bytes):>8} {row.dtype:<8}  "
            f"{row.where}: {row.reason}"
        )
    return lines


def precision_lines(derived: Derived) -> list[str]:
    """What is computed and what is summed in which dtype, where the plan says it."""
    if not derived.plan:
        return []
    plan = Plan.from_yaml(derived.plan)
    own = "their own dtype" if plan.reduce == "bfloat16" else plan.reduce
    lines = []
    if plan.compute:
        lines = [f"computed in {plan.compute}; parameters and their gradients keep their dtype"]
    if plan.compute or any(p.dtype in SMALL_FLOATS for p in derived.params):
        lines.append(f"16-bit floats are summed over ranks in {own}")
    return lines


def mesh_lines(derived: Derived) -> list[str]:
    """One line per mesh axis: its size and what is cut by it."""
    mesh = derived.mesh
    if mesh is None:
        return []
    lines = [f"mesh {mesh_words(mesh)}"]
    for axis in mesh.names:
        cut = [p for p in derived.params if any(axis in axes for axes in p.stored.dims)]
        said = f"{len(cut)} of {len(derived.params)} parameters are cut by it"
        batch = [n for n, lay in derived.inputs.items() if any(axis in a for a in lay.dims)]
        if batch:
            said += f", and the batch ({', '.join(batch)})"
        if not cut and not batch and not any(axis in item.axes for item in derived.communications):
            said = "nothing is cut by it, all its ranks do the same work"
        lines.append(f"  {axis} ({mesh.axis_size(axis)} ranks): {said}")
    return lines


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with equal keys together, groups in order of first appearance."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
