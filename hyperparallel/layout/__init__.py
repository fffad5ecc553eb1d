"""Where tensors lie: meshes, layouts, the elements each rank holds, and the steps between layouts.

A `Mesh` is a named grid of ranks; calling it makes a `Layout`, the paper's
`Layout(device_matrix, alias_name, tensor_map)`. `reshard(src, dst, shape)` is the cheapest list of
explicit steps between two layouts, on one mesh or across two. Everything here is a frozen value;
nothing here imports torch or talks to a device.
"""

from hyperparallel.layout.dtensor_form import from_placements, placements
from hyperparallel.layout.entries import REDUCTIONS
from hyperparallel.layout.exchange import MovedBlock
from hyperparallel.layout.layout import Layout, Mesh, is_even
from hyperparallel.layout.reshard import Costs, find_steps, reshard
from hyperparallel.layout.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Move,
    Pend,
    Permute,
    ReduceScatter,
    SendRecv,
    Slice,
    Step,
)

__all__ = [
    "REDUCTIONS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Costs",
    "Layout",
    "Mesh",
    "Move",
    "MovedBlock",
    "Pend",
    "Permute",
    "ReduceScatter",
    "SendRecv",
    "Slice",
    "Step",
    "find_steps",
    "from_placements",
    "is_even",
    "placements",
    "reshard",
]
