"""Write out the casts that sums of mixed precision hide.

`add(float32, bfloat16)` casts its second operand on the way in. As an op of its own the cast can be done
on summands that ranks have not added up yet: it keeps every bit, so the sum over ranks is then one of
float32 numbers and is not rounded to 16 bits in between. Products need nothing: they pass on what is
pending operand by operand. Every value stays equal bit for bit.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
SUM_OPS = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor)
_COPIED = ("custom", "partitioner_tag", "is_gradient_acc")
"""What says where a node comes from."""


def promote(graph: fx.Graph) -> None:
    """Give every sum of floats operands of the result's dtype, in place."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in SUM_OPS:
            continue
        wide = node.meta["val"].dtype
        for used in node.all_input_nodes:
            value = used.meta["val"]
            if value.dtype in (wide, torch.float64) or not value.is_floating_point() or not value.dim():
                continue
            node.replace_input_with(used, _cast(graph, node, used, wide))


def _cast(graph: fx.Graph, at: fx.Node, used: fx.Node, dtype: torch.dtype) -> fx.Node:
    with graph.inserting_before(at):
        cast = graph.call_function(aten._to_copy.default, (used,), {"dtype": dtype})
    value = used.meta["val"]
    with value.fake_mode:
        cast.meta["val"] = value.to(dtype)
    cast.meta.update({key: at.meta[key] for key in _COPIED if key in at.meta})
    return cast
