"""The rows of the block benchmark: who runs, how it is built, and what is checked of it.

A row builds a `Running`: a module that takes the input and returns the loss, and a way to
read its whole gradients. Compiled rows must have compiled everything: `fullgraph=True` refuses
graph breaks while tracing, and dynamo's counters are read after the run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.shard import dtensor, megatron, ours
from benchmarks.shard.block import BlockSize, make_block, make_input


@dataclasses.dataclass
class Running:
    """A built row on one rank."""

    module: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]
    gradients: Callable[[], dict[str, Tensor]]
    autograd: bool = True  # without, the module itself runs the backward

    def step(self, x_BSD: Tensor) -> Tensor:
        """Forward and backward: fresh gradients of every parameter and of the input."""
        x_BSD.grad = None
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.module(x_BSD)
        if self.autograd:
            loss.backward()
        return loss


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. transport: what carries its collectives ("" for one that has none)."""

    name: str
    build: Callable[[BlockSize], Running]
    compiled: bool = False
    checked: bool = True
    transport: str = "gloo"


def single(size: BlockSize) -> Running:
    model = make_block(size)
    return Running(model, list(model.parameters()), lambda: dtensor.whole_gradients(model))


def hand_written(size: BlockSize, *, communicate: bool, backend: str | None) -> Running:
    local = megatron.megatron_block(make_block(size), size, communicate=communicate)
    module = local if backend is None else torch.compile(local, backend=backend, fullgraph=True)
    return Running(module, list(local.parameters()), lambda: megatron.whole_gradients(local))


def mesh_of_all_ranks() -> torch.distributed.device_mesh.DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def parallelize_module_row(size: BlockSize) -> Running:
    model = dtensor.parallelized(make_block(size), mesh_of_all_ranks())
    return Running(model, list(model.parameters()), lambda: dtensor.whole_gradients(model))


def weights_as_dtensors(size: BlockSize, *, declared: int, backend: str | None) -> Running:
    cut_dim = megatron.CUT_DIM
    if declared == 2:
        cut_dim = {name: dim for name, dim in cut_dim.items() if dim == 1}
    model = dtensor.DTensorWeights(make_block(size), mesh_of_all_ranks(), cut_dim)
    module = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    return Running(module, list(model.parameters()), lambda: dtensor.whole_gradients(model))


def hyperparallel_row(size: BlockSize, *, compiled: bool, transport: str) -> Running:
    block, x_BSD = make_block(size), make_input(size)
    model = ours.parallel_block(block, x_BSD, compiled=compiled, transport=transport)
    return Running(model, list(model.parameters()), lambda: dtensor.whole_gradients(model))


def whole_step_row(size: BlockSize, *, transport: str) -> Running:
    whole = ours.WholeStep(make_block(size), make_input(size), transport)
    return Running(whole.gradients_of, [], whole.whole_gradients, autograd=False)


def over_each_transport(name: str, build: Callable[..., Running]) -> list[Row]:
    """A row of ours on its own transport and on that of the peers."""
    return [
        Row(ours.over(name, each), functools.partial(build, transport=each), transport=each)
        for each in ours.TRANSPORTS
    ]


LOCAL = "local half-block, no communication"
HAND_WRITTEN = "hand-written Megatron TP"
HAND_WRITTEN_INDUCTOR = "hand-written, Inductor"
OURS = "hyperparallel, 2 declared weights"
OURS_WHOLE_STEP = "hyperparallel TrainStep, 2 declared weights"
OURS_INDUCTOR = "hyperparallel, Inductor"
PARALLELIZE = "parallelize_module"
ALL_DTENSORS = "weights as DTensors, 7 declared"

ROWS = (
    Row("single device, whole block", single, transport=""),
    Row(
        LOCAL,
        lambda size: hand_written(size, communicate=False, backend=None),
        checked=False,
        transport="",
    ),
    Row(HAND_WRITTEN, lambda size: hand_written(size, communicate=True, backend=None)),
    Row(
        "hand-written, aot_eager",
        lambda size: hand_written(size, communicate=True, backend="aot_eager"),
        compiled=True,
    ),
    Row(
        HAND_WRITTEN_INDUCTOR,
        lambda size: hand_written(size, communicate=True, backend="inductor"),
        compiled=True,
    ),
    Row(PARALLELIZE, parallelize_module_row),
    Row(ALL_DTENSORS, lambda size: weights_as_dtensors(size, declared=7, backend=None)),
    Row(
        "weights as DTensors, 7 declared, aot_eager",
        lambda size: weights_as_dtensors(size, declared=7, backend="aot_eager"),
        compiled=True,
    ),
    Row(
        "weights as DTensors, 2 declared",
        lambda size: weights_as_dtensors(size, declared=2, backend=None),
    ),
    *over_each_transport(OURS, functools.partial(hyperparallel_row, compiled=False)),
    *over_each_transport(OURS_WHOLE_STEP, whole_step_row),
    *over_each_transport(OURS_INDUCTOR, functools.partial(hyperparallel_row, compiled=True)),
)
