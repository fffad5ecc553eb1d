"""Everything that was decided about a program, in words and in one order, for ranks to compare.

Each rank captures, solves and partitions for itself. What must come out equal on all of them is listed here,
causes before effects, so that the first line that differs says where two ranks parted: versions and
options, the plan, the batch, the parameters, the model's ops with their numbers and shapes, the layout of
every op and parameter, the nodes of the rank's program and what its collectives move. Left out is what may
differ by rank: values of parameters, offsets and sizes of pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from hyperparallel.graph.build import Built
from hyperparallel.graph.program import RankProgram
from hyperparallel.shard.spec import FactorCut, Spec
from hyperparallel.workload import Op, Ref, Workload

Decision = tuple[str, str]
"""What a decision is about, and what was decided."""


def decisions(built: Built, program: RankProgram | None, options: Mapping[str, object]) -> list[Decision]:
    """All decisions about the program of one rank, in an order that is the same on every rank.

    program: None leaves out what only ranks of its mesh write. options: what else the program depends
    on, by name.
    """
    found = [("version of torch", str(torch.__version__))]
    found += [(f"option {name}", str(value)) for name, value in options.items()]
    plan = built.decisions.plan
    found += [(f"plan, {field.name}", str(getattr(plan, field.name))) for field in fields(plan)]
    found += _of_batch(built.workload)
    found += _of_weights(built.workload)
    found += _of_ops(built)
    for group in ("stored", "used", "sources", "outputs"):
        specs: Mapping[str, Spec] = getattr(built.decisions, group)
        found += [(f"{_GROUPS[group]} {name}", _shown(spec)) for name, spec in specs.items()]
    if program is not None:
        found += _of_program(program)
    return found


_GROUPS = {
    "stored": "stored parameter",
    "used": "parameter in use",
    "sources": "value",
    "outputs": "result",
}


def _of_batch(work: Workload) -> Iterator[Decision]:
    for path, value in work.inputs.items():
        yield f"batch, {path}", _kind(work, value)


def _of_weights(work: Workload) -> Iterator[Decision]:
    for name, value in work.params.items():
        trained = "trained" if name in work.grads else "not trained"
        yield f"parameter {name}", f"{_kind(work, value)}, {trained}"
    for name, value in work.buffers.items():
        yield f"buffer {name}", _kind(work, value)


def _kind(work: Workload, value: str) -> str:
    return f"{work.values[value].dtype} of shape {list(work.values[value].shape)}"


def _of_ops(built: Built) -> Iterator[Decision]:
    decided, shown = built.decisions, _Shown()
    for number, op in enumerate(built.workload.ops):
        yield f"op {number} of the model", _op_words(op, built.workload)
        # After the op itself: a layout that differs because the op does is the later line.
        takes, gives = decided.operands[op.name]
        layouts = f"{shown.all(takes)} -> {shown.all(gives)}"
        yield _label(op), f"{_cuts(decided.cuts[op.name])}: {layouts}"


def _op_words(op: Op, work: Workload) -> str:
    """An op with all its arguments: ranks whose models differ in one number make the same program of it."""
    given = [*map(_argument, op.args), *(f"{key}={_argument(arg)}" for key, arg in op.kwargs.items())]
    made = [work.values[name] for name in op.outputs if name is not None]
    forms = ", ".join(f"{value.dtype}{list(value.shape)}" for value in made)
    return f"{op.target}({', '.join(given)}) -> {forms} in {op.module or 'the model itself'}"


def _argument(given: Any) -> str:
    if isinstance(given, tuple):
        return f"[{', '.join(map(_argument, given))}]"
    return given.name if isinstance(given, Ref) else repr(given)


def _label(op: Op) -> str:
    return f"op {op.module or op.name} ({op.target}{', backward' if op.backward else ''})"


def _cuts(cuts: Mapping[str, FactorCut]) -> str:
    if not cuts:
        return "replicated"
    return ", ".join(f"{'/'.join(cut.all_axes)} cuts {factor}" for factor, cut in cuts.items())


class _Shown:
    """Layouts in words, each made once: a program has thousands of operands and few ways to cut them."""

    def __init__(self) -> None:
        self._known: dict[object, str] = {None: "nothing"}

    def all(self, specs: tuple[Spec | None, ...]) -> str:
        known, found = self._known, []
        for spec in specs:
            key = spec and (spec.dims, spec.partial)
            words = known.get(key)
            if words is None:
                assert spec is not None
                words = known[key] = _shown(spec)
            found.append(words)
        return ", ".join(found)


def _shown(spec: Spec) -> str:
    """A layout without its mesh, which the plan tells.

    >>> from hyperparallel.layout import Mesh
    >>> from hyperparallel.shard.spec import make_spec
    >>> _shown(make_spec(Mesh((2,), ("tp",)), [[(4, ("tp",))], [(6, ())]]))
    '(tp, -)'
    """
    dims = ", ".join(
        "x".join("/".join(axes) or "-" for _, axes in factors) for factors in spec.dims
    )
    pending = "".join(f", {op} pending on {axis}" for axis, op in spec.partial)
    return f"({dims}{pending})"


def _target_words(target: Any) -> str:
    """The name of what a node calls, the same in every process: a Python function prints its address."""
    if isinstance(target, FunctionType | BuiltinFunctionType):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target) if hasattr(target, "_schema") else type(target).__qualname__


def _of_program(program: RankProgram) -> Iterator[Decision]:
    collectives, targets = 0, {node.target: "" for node in program.graph.nodes}
    for target in targets:
        targets[target] = _target_words(target)  # once each: torch makes the name of an op anew every time
    for number, node in enumerate(program.graph.nodes):
        yield f"node {number} of the program", f"{node.name} = {targets[node.target]}"
        transfer = node.meta.get("transfer")
        if transfer is not None:
            moved = f"{transfer.kind} over {'/'.join(transfer.axes)} of {transfer.value} in {transfer.dtype}"
            yield f"collective {collectives}", moved
            collectives += 1
