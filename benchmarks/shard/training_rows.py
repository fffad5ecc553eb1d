"""The rows of the training benchmark: three ways to use two ranks, each with torch's own peer.

Tensor parallelism (torch's styles on DTensors), parameters cut over the data ranks (`fully_shard` per
layer and root) and parameters whole on every data rank (`DistributedDataParallel`). The global batch is
the same for all: whole on every tensor-parallel rank, half on every data-parallel rank. All use the fused
AdamW.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.shard import ours
from benchmarks.shard.llama import LlamaSize, make_batch, make_llama

LEARNING_RATE = 1e-3

Step = Callable[[], float | Tensor]


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """One line of the table. average: each rank's loss is that of its own part of the batch."""

    name: str
    build: Callable[[LlamaSize], Step]
    transport: str = "gloo"
    peer: str = ""
    average: bool = False


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused, with DTensors in a group of their own: one fused call can't mix them."""
    parameters = list(model.parameters())
    groups = [
        [p for p in parameters if isinstance(p, DTensor)],
        [p for p in parameters if not isinstance(p, DTensor)],
    ]
    return torch.optim.AdamW(
        [{"params": group} for group in groups if group], lr=LEARNING_RATE, fused=True
    )


def ordinary_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """The loop every PyTorch user writes."""
    optimizer = adamw(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def single_device(size: LlamaSize) -> Step:
    return ordinary_step(make_llama(size), make_batch())


def dtensor_tp(size: LlamaSize) -> Step:
    """torch's documented tensor-parallel plan for Llama, vocabulary-sharded ends included."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = make_llama(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for into in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"model.layers.*.{into}"] = ColwiseParallel()
    for into in ("mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{into}"] = ColwiseParallel()
    for out in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{out}"] = RowwiseParallel()
    return ordinary_step(parallelize_module(model, mesh, plan), make_batch())


def rank_batch() -> dict[str, Tensor]:
    """This rank's part of the global batch."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return {name: value.chunk(num_ranks)[rank] for name, value in make_batch().items()}


def fsdp2(size: LlamaSize) -> Step:
    """`fully_shard` on every layer and on the root, defaults."""
    from torch.distributed.fsdp import fully_shard

    model: Any = make_llama(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return ordinary_step(model, rank_batch())


def ddp(size: LlamaSize) -> Step:
    """`DistributedDataParallel` in its quickest setting: gradients live in the buckets, buffers stay."""
    from torch.nn.parallel import DistributedDataParallel

    quickest = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    return ordinary_step(DistributedDataParallel(make_llama(size), **quickest), rank_batch())


def ours_tp(size: LlamaSize, transport: str) -> Step:
    """The two matrices that leave a sharded region are declared, and the vocabulary's dim."""
    import hyperparallel as hp

    mesh = hp.Layout((dist.get_world_size(),), ("tp",))
    params = {
        "*.o_proj.weight": mesh(None, "tp"),
        "*.down_proj.weight": mesh(None, "tp"),
        "model.embed_tokens.weight": mesh("tp", None),
        "lm_head.weight": mesh("tp", None),
    }
    return our_step(hp.Plan(mesh, params=params), size, transport)


def ours_fsdp(size: LlamaSize, transport: str) -> Step:
    """Nothing declared but that parameters are kept cut over the data ranks."""
    import hyperparallel as hp

    mesh = hp.Layout((dist.get_world_size(),), ("dp",))
    return our_step(hp.Plan(mesh, fsdp="dp"), size, transport)


def ours_dp(size: LlamaSize, transport: str) -> Step:
    """Nothing declared but the mesh: its one axis cuts the batch."""
    import hyperparallel as hp

    return our_step(hp.Plan(hp.Layout((dist.get_world_size(),), ("dp",))), size, transport)


def our_step(plan: Any, size: LlamaSize, transport: str) -> Step:
    import hyperparallel as hp

    model, batch = make_llama(size), make_batch()
    train_step = hp.TrainStep(
        model,
        lambda named: torch.optim.AdamW(named, lr=LEARNING_RATE, fused=True),
        plan,
        batch,
        here=ours.here(plan.mesh, transport),
    )

    def step() -> float:
        return train_step.step(batch).loss

    return step


def beside(peer: TrainingRow, name: str, build: Callable[..., Step]) -> tuple[TrainingRow, ...]:
    """A peer, and ours on its own transport and on that of the peer."""
    mine = [
        TrainingRow(
            ours.over(name, each), functools.partial(build, transport=each), each, peer.name
        )
        for each in ours.TRANSPORTS
    ]
    return (peer, *mine)


SHARDED = (
    *beside(
        TrainingRow("DTensor TP (parallelize_module)", dtensor_tp),
        "hyperparallel TrainStep, TP",
        ours_tp,
    ),
    *beside(
        TrainingRow("FSDP2 (fully_shard)", fsdp2, average=True),
        "hyperparallel TrainStep, FSDP",
        ours_fsdp,
    ),
)
REPLICATED = beside(
    TrainingRow("DDP (DistributedDataParallel)", ddp, average=True),
    "hyperparallel TrainStep, dp",
    ours_dp,
)
ROWS = {row.name: row for row in (*SHARDED, *REPLICATED)}
