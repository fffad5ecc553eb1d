"""Part B: whole training steps (forward, backward, AdamW) of a small Llama on two ranks.

Two pairs of peers: tensor parallelism (torch's styles on DTensors, against the same declared
layouts here) and parameters cut over the data ranks (`fully_shard` per layer and root, against
`fsdp` here). The global batch is the same for all: whole on every tensor-parallel rank, half on
every data-parallel rank. All use the fused AdamW, and all losses are compared with one device's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.ranks import run_ranks
from benchmarks.record import Sample, Spread, Table, across_ranks, interleave
from benchmarks.shard.blocks import agree
from benchmarks.shard.llama import BATCH, HIDDEN, SEQUENCE, VOCABULARY, make_batch, make_llama

NUM_RANKS = 2
WARMUP_STEPS = 3
LEARNING_RATE = 1e-3

Step = Callable[[], float | Tensor]


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


def single_device(num_layers: int) -> Step:
    return ordinary_step(make_llama(num_layers), make_batch())


def dtensor_tp(num_layers: int) -> Step:
    """torch's documented tensor-parallel plan for Llama, vocabulary-sharded ends included."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = make_llama(num_layers)
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


def fsdp2(num_layers: int) -> Step:
    """`fully_shard` on every layer and on the root, defaults."""
    from torch.distributed.fsdp import fully_shard

    model: Any = make_llama(num_layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return ordinary_step(model, rank_batch())


def ours_tp(num_layers: int) -> Step:
    """The two matrices that leave a sharded region are declared, and the vocabulary's dim."""
    import hyperparallel as hp

    mesh = hp.Layout((dist.get_world_size(),), ("tp",))
    plan = hp.Plan(
        mesh,
        params={
            "*.o_proj.weight": mesh(None, "tp"),
            "*.down_proj.weight": mesh(None, "tp"),
            "model.embed_tokens.weight": mesh("tp", None),
            "lm_head.weight": mesh("tp", None),
        },
    )
    return ours(plan, num_layers)


def ours_fsdp(num_layers: int) -> Step:
    """Nothing declared but that parameters are kept cut over the data ranks."""
    import hyperparallel as hp

    mesh = hp.Layout((dist.get_world_size(),), ("dp",))
    return ours(hp.Plan(mesh, fsdp="dp"), num_layers)


def ours(plan: Any, num_layers: int) -> Step:
    import hyperparallel as hp

    model, batch = make_llama(num_layers), make_batch()
    train_step = hp.TrainStep(
        model, lambda named: torch.optim.AdamW(named, lr=LEARNING_RATE, fused=True), plan, batch
    )

    def step() -> float:
        return train_step.step(batch).loss

    return step


DTENSOR, FSDP2 = "DTensor TP (parallelize_module)", "FSDP2 (fully_shard)"
OURS_TP, OURS_FSDP = "hyperparallel TrainStep, TP", "hyperparallel TrainStep, FSDP"
ROWS: dict[str, Callable[[int], Step]] = {
    DTENSOR: dtensor_tp,
    OURS_TP: ours_tp,
    FSDP2: fsdp2,
    OURS_FSDP: ours_fsdp,
}
PEERS = {OURS_TP: DTENSOR, OURS_FSDP: FSDP2}


@dataclasses.dataclass
class Trained:
    """What one rank learned about one row."""

    failure: str | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)


def first_losses(step: Step, average: bool) -> list[float]:
    """The losses of the first steps; `average` over ranks where each sees its own part."""
    losses = torch.tensor([float(step()) for _ in range(WARMUP_STEPS)], dtype=torch.float64)
    if average:
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return losses.tolist()


def train_rows(names: Sequence[str], num_layers: int, rounds: int) -> dict[str, Trained]:
    """Runs on every rank."""
    trained, steps = {}, {}
    for name in names:
        row = trained[name] = Trained()
        try:
            step = ROWS[name](num_layers)
            row.losses = first_losses(step, average=name == FSDP2)
            steps[name] = step
        except Exception as error:  # a row may fail in any way; the table says how
            first_line = (str(error).strip() or "no message").splitlines()[0]
            row.failure = f"{type(error).__name__}: {first_line}"[:160]
        row.failure = agree(row.failure)
        if row.failure is not None:
            steps.pop(name, None)
    for name, samples in interleave(steps, rounds, 1, before=dist.barrier).items():
        trained[name].samples = samples
    return trained


def single_losses(num_layers: int) -> list[float]:
    step = single_device(num_layers)
    return [float(step()) for _ in range(WARMUP_STEPS)]


def training_table(
    names: Sequence[str], num_layers: int, rounds: int
) -> tuple[Table, dict[str, Any]]:
    """Launch ranks, train, and lay the findings out; also the raw samples."""
    wanted = run_ranks(1, single_losses, num_layers)[0]
    by_rank = run_ranks(NUM_RANKS, train_rows, names, num_layers, rounds)
    merged = across_ranks([{n: t.samples for n, t in found.items()} for found in by_rank])
    cpu = {n: Spread.of([s.cpu_seconds for s in taken]) for n, taken in merged.items() if taken}
    wall = {n: Spread.of([s.wall_seconds for s in taken]) for n, taken in merged.items() if taken}
    rows: list[tuple[Any, ...]] = []
    for name, row in by_rank[0].items():
        if row.failure is not None:
            rows.append((name, None, None, None, None, None, f"failed: {row.failure}"))
            continue
        peer = PEERS.get(name)
        faster: list[float | None] = [None, None]
        if peer in cpu:
            faster = [round(t[peer].median / t[name].median, 2) for t in (wall, cpu)]
        error = max(abs(a - b) / abs(b) for a, b in zip(row.losses, wanted, strict=True))
        note = "" if error < 1e-4 else "WRONG RESULT"
        rows.append((name, wall[name].text(1e3, 0), cpu[name].text(1e3, 0), *faster, error, note))
    columns = (
        "program",
        "wall ms a step",
        "CPU ms a step",
        "peer / this, wall",
        "peer / this, CPU",
        "rel. loss error",
        "note",
    )
    title = f"Training step with AdamW, Llama of {num_layers} layers, hidden {HIDDEN}, "
    title += f"sequence {SEQUENCE}, vocabulary {VOCABULARY}, batch {BATCH}, {NUM_RANKS} ranks"
    notes = (
        f"{rounds} interleaved rounds of one step after {WARMUP_STEPS} warm-up steps; median "
        "(quartiles); CPU: all threads of a rank, mean of ranks; wall: the slower rank",
        "freed memory stays with the processes, for every program alike",
        f"the loss error is the largest of the first {WARMUP_STEPS} steps against one device",
    )
    raw = {name: [dataclasses.astuple(s) for s in taken] for name, taken in merged.items()}
    return Table(title, columns, tuple(rows), notes), {f"train {num_layers} layers": raw}
