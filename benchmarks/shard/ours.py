"""The hyperparallel rows: the same single-device modules, two declared weights, the public API.

Only the two matrices that leave a sharded region are declared, cut along their input features;
every other layout is derived. Each builder imports hyperparallel when called, so that a row
that can't be built is reported as one failed row.

Every row of ours stands twice: over the transport that hyperparallel takes by itself (shared memory
between ranks of one machine) and over plain gloo, as all peers are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.shard.block import BlockLoss

TRANSPORTS = {"own": "auto", "gloo": "messages"}
"""What the tables call a transport, and what hyperparallel does."""

DECLARED = ("*.o.weight", "*.down.weight")


def over(name: str, transport: str) -> str:
    """The name of a row of ours over a transport."""
    return name if transport == "own" else f"{name}, over {transport}"


def here(mesh: Any, transport: str) -> Any:
    """This rank with groups over a transport; all ranks make it together."""
    from hyperparallel.runtime.comm.groups import Groups
    from hyperparallel.runtime.job.here import Here

    return Here.in_job(mesh, Groups.of_default(transport=TRANSPORTS[transport]))


def block_plan(num_ranks: int) -> Any:
    """The two declared layouts of the block."""
    import hyperparallel as hp

    mesh = hp.Layout((num_ranks,), ("tp",))
    return hp.Plan(mesh, params={pattern: mesh(None, "tp") for pattern in DECLARED})


def parallel_block(model: BlockLoss, x_BSD: Tensor, *, compiled: bool, transport: str) -> nn.Module:
    """`model` as one rank's program behind autograd, for any training loop."""
    import hyperparallel as hp

    plan = block_plan(dist.get_world_size())
    place = here(plan.mesh, transport)
    module: nn.Module = hp.parallelize(model, plan, {"x_BSD": x_BSD}, compile=compiled, here=place)
    return module


class WholeStep:
    """`TrainStep`'s forward and backward, one program with no autograd around it.

    The input's gradient is part of the program, as it is asked for, but has nowhere to be put.
    """

    def __init__(self, model: BlockLoss, x_BSD: Tensor, transport: str) -> None:
        import hyperparallel as hp

        plan = block_plan(dist.get_world_size())
        self.model = model
        place = here(plan.mesh, transport)
        self.train_step = hp.TrainStep(model, torch.optim.SGD, plan, {"x_BSD": x_BSD}, here=place)

    def gradients_of(self, x_BSD: Tensor) -> Tensor:
        """The loss; gradients of this rank's pieces are set."""
        loss: Tensor = self.train_step.gradients({"x_BSD": x_BSD})
        return loss

    def whole_gradients(self) -> dict[str, Tensor]:
        grads = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            local = self.train_step.params[name].grad
            grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements)
            grads[name] = grad.full_tensor()
        return grads
