"""The DTensor peers of the block: `parallelize_module`, and bare DTensor weights.

`parallelize_module` gets the documented plan for a Llama block: column-wise into a region,
row-wise out of it, and the replicated rest left alone. The bare rows only turn weights into
DTensors: the declared ones cut, the rest (and buffers, and the input) replicated, because an op
refuses a mix of DTensors and plain tensors; DTensor chooses all communication op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.shard.block import BlockLoss


def parallelized(model: BlockLoss, mesh: DeviceMesh) -> BlockLoss:
    """The block under torch's own tensor-parallel styles, changed in place."""
    plan = {
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    parallelize_module(model.block, mesh, plan)
    return model


class DTensorWeights(nn.Module):
    """The block with DTensor weights; the input and the loss stay plain outside."""

    def __init__(self, model: BlockLoss, mesh: DeviceMesh, cut_dim: Mapping[str, int]) -> None:
        super().__init__()
        for name, parameter in list(model.named_parameters()):
            placement = Shard(cut_dim[name]) if name in cut_dim else Replicate()
            weight = distribute_tensor(parameter.detach(), mesh, [placement])
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(weight))
        for name, buffer in list(model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            whole = distribute_tensor(buffer, mesh, [Replicate()])
            setattr(model.get_submodule(owner), leaf, whole)
        self.model = model
        self.mesh = mesh

    def forward(self, x_BSD: Tensor) -> Tensor:
        whole_BSD = DTensor.from_local(x_BSD, self.mesh, [Replicate()], run_check=False)
        loss: DTensor = self.model(whole_BSD)
        return loss.full_tensor()


def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Bring every gradient to its parameter's layout: a backward may leave it pending or cut otherwise."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = grad.redistribute(placements=parameter.placements)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient as a plain whole tensor."""
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        grads[name.removeprefix("model.")] = (
            grad.full_tensor() if isinstance(grad, DTensor) else grad
        )
    return grads
