"""Write the code of a region into one rank's program: segments, and collectives between them.

The forward ends with a state that holds its results and what its backward needs; that state is the token by
which the backward finds it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.local.local_op import contiguous
from hyperparallel.graph.region.record import RegionBackward, RegionForward
from hyperparallel.graph.region.segments import RegionStart, Run, Steps
from hyperparallel.workload import Op

Emit = Callable[..., fx.Node]
Note = Callable[[fx.Node, str, tuple[str, ...], int, str, str], None]
"""Notes what a collective moves: its node, kind, axes, bytes, value and dtype."""


def write_region(
    target: RegionForward, args: Sequence[fx.Node], rank: int, op: Op, emit: Emit, note: Note,
) -> list[fx.Node | None]:  # fmt: skip
    """Emit the forward or backward of a region on local operands; one node per result, None if unused."""
    code = target.region.program(rank)
    ends = isinstance(target, RegionBackward)
    state: Any = args[0] if ends else ()
    # The region was traced on contiguous tensors; a local piece may be a slice of something larger.
    given = [emit(contiguous, x) for x in (args[1:] if ends else args)]

    def noted(node: fx.Node, step: RegionStart) -> None:
        note(node, step.name, step.axes, step.num_bytes, op.name, step.dtype)

    state = _emit_steps(code.backward if ends else code.forward, state, given, emit, noted)
    # The last output of a forward is the token, which the state itself stands for.
    names = op.outputs if ends else op.outputs[:-1]
    results = [None if name is None else emit(operator.getitem, state, i) for i, name in enumerate(names)]
    return results if ends else [*results, state]


def _emit_steps(
    steps: Steps, state: Any, given: Sequence[fx.Node], emit: Emit,
    note: Callable[[fx.Node, RegionStart], None],
) -> fx.Node:  # fmt: skip
    started: list[fx.Node] = []
    for place, step in enumerate(steps):
        if isinstance(step, Run):
            # The first segment takes the operands; each later one what its collectives have brought.
            fresh = given if place == 0 else [emit(communication.wait, started[i]) for i in step.waits]
            state = emit(step.segment, state, *fresh)
        else:
            operand = emit(operator.getitem, state, step.operand)
            started.append(emit(communication.start_of(step.name), operand, *step.args, step.axes))
            note(started[-1], step)
    assert isinstance(state, fx.Node)
    return state
