"""The programs that are timed on devices: one block, and whole training steps, ours and the peers'.

A row is built on every rank and gives a function that does one step and returns the loss as a tensor. All
rows of a table have the same weights, batch, optimizer and transport: NCCL, or gloo on CPU ranks. Rows for
several ranks are left out on one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

import hyperparallel as hp
from benchmarks.shard import dtensor, megatron, ours
from benchmarks.shard.block import BlockSize, make_block, make_input
from benchmarks.shard.llama import LlamaSize, make_batch, make_llama
from benchmarks.shard.training_rows import LEARNING_RATE, ordinary_step

Step = Callable[[], Tensor]
BLOCK = {"cuda": BlockSize(4, 1024, 2048, 16), "cpu": BlockSize(2, 16, 64, 4)}
LLAMA = {"cuda": LlamaSize(8, 1024), "cpu": LlamaSize(1, 64)}
ROWS_PER_RANK = 4
PLAIN = "gloo"
"""The transport of `ours` that is torch's process group, whatever that is made of."""


@dataclass(frozen=True)
class Row:
    """One line of a table. versus: the row it is compared with; several: it wants two ranks or more."""

    name: str
    build: Callable[[torch.device], Step]
    versus: str = ""
    several: bool = False


def mesh_of_all(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def block_step(module: nn.Module, x_BSD: Tensor) -> Step:
    """Forward and backward with fresh gradients."""

    def step() -> Tensor:
        x_BSD.grad = None
        module.zero_grad()
        loss: Tensor = module(x_BSD)
        loss.backward()
        return loss.detach()

    return step


def block_on(device: torch.device) -> tuple[BlockSize, Any, Tensor]:
    size = BLOCK[device.type]
    return size, make_block(size).to(device), make_input(size).detach().to(device).requires_grad_()


def block_alone(device: torch.device, compiled: bool = False) -> Step:
    _, model, x = block_on(device)
    return block_step(torch.compile(model, fullgraph=True) if compiled else model, x)  # type: ignore[arg-type]


def block_by_hand(device: torch.device) -> Step:
    size, model, x = block_on(device)
    return block_step(megatron.megatron_block(model, size, communicate=True).to(device), x)


def block_of_dtensors(device: torch.device) -> Step:
    _, model, x = block_on(device)
    return block_step(dtensor.parallelized(model, mesh_of_all(device)), x)


def block_ours(device: torch.device, compiled: bool = False) -> Step:
    _, model, x = block_on(device)
    return block_step(ours.parallel_block(model, x, compiled=compiled, transport=PLAIN), x)


def block_ours_whole(device: torch.device) -> Step:
    _, model, x = block_on(device)
    whole = ours.WholeStep(model, x, PLAIN)
    return lambda: whole.gradients_of(x)


ALONE, ALONE_COMPILED = "one device", "one device, torch.compile"
BY_HAND = "hand-written tensor parallelism"
BLOCK_ROWS = (
    Row(ALONE, block_alone),
    Row(ALONE_COMPILED, lambda device: block_alone(device, True)),
    Row(BY_HAND, block_by_hand, several=True),
    Row("parallelize_module", block_of_dtensors, BY_HAND, several=True),
    Row("hyperparallel", block_ours, BY_HAND),
    Row("hyperparallel TrainStep", block_ours_whole, BY_HAND),
    Row("hyperparallel, Inductor", lambda device: block_ours(device, True), BY_HAND),
)
"""On one rank, where nothing is written by hand, rows are compared with one device."""


def batch_on(device: torch.device, own: bool = False) -> dict[str, Tensor]:
    """The global batch, or this rank's rows of it."""
    n = dist.get_world_size()
    whole = make_batch(batch=ROWS_PER_RANK * n)
    return {name: (x.chunk(n)[dist.get_rank()] if own else x).to(device) for name, x in whole.items()}


def llama_on(device: torch.device) -> nn.Module:
    return make_llama(LLAMA[device.type]).to(device)


def llama_alone(device: torch.device) -> Step:
    return ordinary_step(llama_on(device), batch_on(device))


def mean_over_ranks(step: Step) -> Step:
    """The loss of the whole batch, of ranks that have equal parts of it."""

    def whole() -> Tensor:
        loss = step()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return whole


def ddp(device: torch.device) -> Step:
    own = [device.index] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(llama_on(device), device_ids=own)
    return mean_over_ranks(ordinary_step(model, batch_on(device, own=True)))


def fsdp2(device: torch.device) -> Step:
    from torch.distributed.fsdp import fully_shard

    model: Any = llama_on(device)
    mesh = mesh_of_all(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mean_over_ranks(ordinary_step(model, batch_on(device, own=True)))


def dtensor_tp(device: torch.device) -> Step:
    """torch's documented tensor-parallel plan for Llama."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    into = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan |= {f"model.layers.*.{name}": ColwiseParallel() for name in into}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    model = parallelize_module(llama_on(device), mesh_of_all(device), plan)
    return ordinary_step(model, batch_on(device))


def fused(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=LEARNING_RATE, fused=True)


def ours_of(axis: str, **more: Any) -> Callable[[torch.device], Step]:
    """A `TrainStep` over all ranks along one axis; tp declares the weights that peers cut likewise."""

    def build(device: torch.device) -> Step:
        mesh = hp.Layout((dist.get_world_size(),), (axis,))
        out, vocabulary = mesh(None, axis), mesh(axis, None)
        params = {"*.o_proj.weight": out, "*.down_proj.weight": out}
        params |= {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
        plan = hp.Plan(mesh, params if axis == "tp" else {}, fsdp="fsdp" if axis == "fsdp" else None)
        batch = batch_on(device)
        step = hp.TrainStep(
            make_llama(LLAMA[device.type]), fused, plan, batch, here=ours.here(mesh, PLAIN), **more
        )
        return lambda: torch.tensor(step.step(batch).loss)

    return build


STEP_ROWS = (
    Row(ALONE, llama_alone),
    Row("DistributedDataParallel", ddp, several=True),
    Row("hyperparallel dp", ours_of("dp"), "DistributedDataParallel"),
    Row("fully_shard (FSDP2)", fsdp2, several=True),
    Row("hyperparallel fsdp", ours_of("fsdp"), "fully_shard (FSDP2)", several=True),
    Row("DTensor tensor parallelism", dtensor_tp, several=True),
    Row("hyperparallel tp", ours_of("tp"), "DTensor tensor parallelism", several=True),
    Row("hyperparallel dp, Inductor", ours_of("dp", compile=True), "DistributedDataParallel"),
)
