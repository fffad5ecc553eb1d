"""A whole training run as one value, and what each rank (or one device alone) does with it.

The launcher hands the same `TrainJob` to every rank. A rank builds the model from the seed, so all ranks
(and the single-device check) start from the same weights, makes a `TrainStep` under the plan, and
runs the loop. Rank 0 talks: what was derived, the progress line, the run's files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hyperparallel.graph.derive import derived
from hyperparallel.plan.derived import Derived
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.job.session import Session
from hyperparallel.runtime.module.step import TrainStep
from hyperparallel.train.batches import Batches
from hyperparallel.train.config import TrainConfig, learning_rate
from hyperparallel.train.loop import TrainResult, train
from hyperparallel.train.progress import ProgressLine
from hyperparallel.train.steps import ShardedStep, SingleDeviceStep
from hyperparallel.train.tokens import open_tokens
from hyperparallel.train.tracing import TracedSteps


@dataclass(frozen=True)
class TrainJob:
    """What every rank needs to know.

    model: builds the module; called after seeding. tokens: the token file, made before ranks start.
    show: called on rank 0 with what was derived, before the first step.
    """

    config: TrainConfig
    plan: Plan
    model: Callable[[TrainConfig], nn.Module]
    tokens: Path
    show: Callable[[Derived], None] | None = None


def train_rank(session: Session, job: TrainJob) -> TrainResult:
    """Run one rank of a job to its end."""
    config = job.config
    batches = make_batches(job)
    step = TrainStep(
        make_model(job),
        lambda named: adamw(config, named),
        job.plan,
        batches.batch(0),
        accumulate=config.accumulate,
        clip=config.clip_norm,
    )
    record = derived(step.program.built)
    sinks = []
    if session.rank == 0:
        if job.show is not None:
            job.show(record)
        sinks.append(ProgressLine(config.steps))
    sharded = ShardedStep(step)
    if config.trace is not None:
        facts = {"model": config.model, "plan": record.plan_hash, "torch": str(torch.__version__)}
        sharded = TracedSteps(step, config.trace, facts)
    return train(
        config,
        sharded,
        batches,
        rank=session.rank,
        world=session.world_size,
        sinks=sinks,
        plan_hash=record.plan_hash,
        stop_asked=session.is_stopping,
    )


def single_device_losses(job: TrainJob, steps: int) -> list[float]:
    """Losses of the first `steps` steps of a job, run by the plain module on one device."""
    config = job.config
    model = make_model(job).train()
    optimizer = adamw(config, list(model.named_parameters()))
    step = SingleDeviceStep(model, optimizer, config.clip_norm, job.plan.compute)
    batches = make_batches(job)
    losses = []
    for number in range(min(steps, config.steps)):
        step.set_lr(learning_rate(config, number))
        losses.append(float(step.step(next(batches))["loss"]))
    return losses


def make_model(job: TrainJob) -> nn.Module:
    """The model with the weights that the seed gives, in the run's dtype."""
    torch.manual_seed(job.config.seed)
    # In the run's dtype after making: the numbers drawn are those of float32 in every dtype.
    return job.model(job.config).to(getattr(torch, job.config.dtype))


def make_batches(job: TrainJob) -> Batches:
    """The global batches of a job, from the first on."""
    config = job.config
    return Batches(open_tokens(job.tokens), config.batch_size, config.seq_len, config.seed)


def adamw(config: TrainConfig, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW with the run's settings over (name, parameter) pairs."""
    return torch.optim.AdamW(named, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
