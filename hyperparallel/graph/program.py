"""One rank's program: an FX graph over plain local tensors with explicit communication.

Placeholders come in the order params, buffers, inputs, tangents; results in the order outputs,
gradients. A collective is a pair of nodes, `..._start` and `wait`; its group is written as the tuple of
mesh axes it spans and bound to real process groups (or virtual ones) when the program is run. Nodes
carry `meta["backward"]`, `meta["constant"]` (depends on nothing that changes between steps),
`meta["module"]`, and collectives their `meta["transfer"]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from hyperparallel.shard.spec import Spec


@dataclass(frozen=True)
class Transfer:
    """What one collective moves: for reports, counts and the simulator.

    num_bytes: bytes that this rank receives. value: the joint graph's name of the tensor.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    value: str
    module: str
    backward: bool
    reason: str


@dataclass
class RankProgram:
    """The program of `rank`.

    params, buffers, inputs, tangents: name -> placeholder node name. outputs, grads: name -> node name.
    `output_specs` gives each output's layout, `grad_specs` each gradient's (that of its stored
    parameter).
    """

    graph: fx.Graph
    rank: int
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    inputs: Mapping[str, str]
    tangents: Mapping[str, str]
    outputs: Mapping[str, str]
    grads: Mapping[str, str]
    input_grads: Mapping[str, str]
    mutations: Mapping[str, str]
    input_specs: Mapping[str, Spec]
    output_specs: Mapping[str, Spec]
    grad_specs: Mapping[str, Spec]

    def transfers(self) -> list[Transfer]:
        """Every collective of a step, in order."""
        return [n.meta["transfer"] for n in self.graph.nodes if "transfer" in n.meta]
