"""One rank's program: an FX graph over plain local tensors with explicit communication.

Placeholders come in the order params, buffers, inputs, tangents; results in the order gradients of
parameters, gradients of inputs, outputs, new values of buffers. A collective is a pair of nodes, `..._start`
and `wait`; its group is written as the tuple of mesh axes it spans and bound to real process groups (or
virtual ones) when the program is run. Nodes carry `meta["backward"]`, `meta["constant"]` (depends on nothing
that changes between steps), `meta["module"]`, and collectives their `meta["transfer"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from hyperparallel.cluster import Rates
from hyperparallel.plan.derived import RewriteCount
from hyperparallel.shard.spec import Spec
from hyperparallel.workload.instruction import stream_of


@dataclass(frozen=True)
class Transfer:
    """What one start/wait pair moves: for the order of the program, reports, counts and the simulator.

    kind: a collective's name, or a copy's. axes: mesh axes of a collective. num_bytes: bytes that this rank
    receives. value: the joint graph's name of the tensor. dtype: that of what moves, which for a reduction
    may be wider than the tensor's own. tier: the memory in which the result lies. stream: what carries it,
    `comm.<axes>` where nothing is said; pairs of one stream move one after another. held_bytes: bytes that
    exist while it is under way, the larger of what goes in and what comes out, on the fullest rank, so that
    every rank counts the same.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    value: str
    module: str
    backward: bool
    reason: str
    dtype: str = "float32"
    tier: str = "device"
    stream: str = ""
    held_bytes: int = 0

    def __post_init__(self) -> None:
        # The class is frozen; what is not said follows from the axes and the bytes.
        object.__setattr__(self, "stream", self.stream or stream_of(self.axes))
        object.__setattr__(self, "held_bytes", self.held_bytes or self.num_bytes)


@dataclass
class RankProgram:
    """The program of `rank`.

    params, buffers, inputs, tangents: name -> placeholder node name. results: what the graph returns, in
    order, as (role, name) with role "grad", "input_grad", "output" or "mutation"; the properties of those
    names look the nodes up, so they stay right when a pass rewrites the graph. `output_specs` gives each
    output's layout, `grad_specs` each gradient's (that of its stored parameter).
    """

    graph: fx.Graph
    rank: int
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    inputs: Mapping[str, str]
    tangents: Mapping[str, str]
    results: Sequence[tuple[str, str]]
    input_specs: Mapping[str, Spec]
    output_specs: Mapping[str, Spec]
    grad_specs: Mapping[str, Spec]
    rates: Rates
    """What the decisions were priced with, for passes that weigh."""
    in_flight_bytes: int | None = None
    """What fetches, and what stores, may hold while they are under way (`passes/overlap.py`)."""
    joint: bool = True
    """Whether forward and backward run as one; else nothing of the forward may wait for the backward."""
    exact: bool = False
    """Whether passes must keep every bit of the results (`Plan.exact`)."""
    rewrites: Sequence[RewriteCount] = ()
    """What local rewrites replaced (`passes/peephole/`)."""

    def _role(self, role: str) -> dict[str, fx.Node]:
        # Looked up each time: a pass may have put another node in the place of a result.
        returned: Any = next(iter(reversed(self.graph.nodes))).args[0]
        pairs = zip(self.results, returned, strict=True)
        return {name: node for (r, name), node in pairs if r == role}

    @property
    def outputs(self) -> dict[str, fx.Node]:
        """Path -> node of each output."""
        return self._role("output")

    @property
    def grads(self) -> dict[str, fx.Node]:
        """Parameter -> node of its gradient."""
        return self._role("grad")

    @property
    def input_grads(self) -> dict[str, fx.Node]:
        """Path in the batch -> node of its gradient."""
        return self._role("input_grad")

    @property
    def mutations(self) -> dict[str, fx.Node]:
        """Buffer -> node of its new value."""
        return self._role("mutation")

    def transfers(self) -> list[Transfer]:
        """Every collective of a step, in order."""
        return [n.meta["transfer"] for n in self.graph.nodes if "transfer" in n.meta]
