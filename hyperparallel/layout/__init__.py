"""Where tensors lie: meshes, layouts, the elements each rank holds, and the steps between layouts.

A `Mesh` is a named grid of ranks; calling it makes a `Layout`, the paper's
`Layout(device_matrix, alias_name, tensor_map)`. `reshard(src, dst, shape)` is the cheapest list of explicit
steps between two layouts, on one mesh or across two. Everything here is a frozen value; nothing here
imports torch or talks to a device.
"""

from hyperparallel.layout.layout import REDUCTIONS, Layout
from hyperparallel.layout.mesh import Mesh
from hyperparallel.layout.placement import from_placements, placements
from hyperparallel.layout.shards import is_even

__all__ = ["REDUCTIONS", "Layout", "Mesh", "from_placements", "is_even", "placements"]
