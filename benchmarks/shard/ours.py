"""The hyperparallel rows: the same single-device modules, two declared weights, the public API.

Only the two matrices that leave a sharded region are declared, cut along their input features;
every other layout is derived. Each builder imports hyperparallel when called, so that a row
that can't be built is reported as one failed row.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.shard.block import BlockLoss

DECLARED = ("*.o.weight", "*.down.weight")


def block_plan(num_ranks: int) -> Any:
    """The two declared layouts of the block."""
    import hyperparallel as hp

    mesh = hp.Layout((num_ranks,), ("tp",))
    return hp.Plan(mesh, params={pattern: mesh(None, "tp") for pattern in DECLARED})


def parallel_block(model: BlockLoss, x_BSD: Tensor, *, compiled: bool) -> nn.Module:
    """`model` as one rank's program."""
    import hyperparallel as hp

    plan = block_plan(dist.get_world_size())
    options = {"compile": True} if compiled else {}
    module: nn.Module = hp.parallelize(model, plan, {"x_BSD": x_BSD}, **options)
    return module
