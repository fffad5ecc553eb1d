"""Random numbers that other ranks draw are drawn here too, and dropped.

Ranks of one mesh all draw every random tensor whole (`graph/local/random.py`), so their generators stay
alike. Where parts of a model run on meshes of their own, a rank draws for its part only. So it also draws
what the other parts do, in the order of the forward: then each number is that of the whole model on one
device, nothing is sent, and the generators of all ranks of the job are alike after every step. The price is
what one mesh pays for all the model's random numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx


def replay(nodes: Sequence[fx.Node], device: torch.device) -> None:
    """Advance the generator of `device` as these nodes of a captured graph do.

    How far it goes depends on an operand's shape, dtype and order in memory, not on its values (ops of which
    that is not so are refused in parts): zeros will do.
    """
    with torch.no_grad():
        for node in nodes:
            args = fx.node.map_arg(node.args, lambda n: _zeros_like(n, device))
            kwargs = fx.node.map_arg(node.kwargs, lambda n: _zeros_like(n, device))
            node.target(*args, **kwargs)  # type: ignore[operator]


def _zeros_like(node: fx.Node, device: torch.device) -> Tensor:
    fake = node.meta["val"]
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device).zero_()
