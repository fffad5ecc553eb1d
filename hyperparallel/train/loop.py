"""The training loop of one rank: data, rate, step, metrics, checkpoints, a clean stop.

The loop knows nothing of layouts: the step it is given does the work, and every rank calls it with
the same global batch. A run is a function of its configuration: batches follow from the position,
rates from the step number, and a checkpoint holds the rest (weights, optimizer, random generators,
position), so a resumed run repeats an uninterrupted one bit for bit on the same layout.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from hyperparallel.errors import CheckpointError, UserError
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.checkpoint.model import (
    empty_random_state,
    random_state,
    restore_random_state,
)
from hyperparallel.train.batches import Batches
from hyperparallel.train.config import TrainConfig, learning_rate
from hyperparallel.train.metrics import (
    MetricsFile,
    Sink,
    StepRecord,
    TensorBoardFolder,
    peak_memory_bytes,
)
from hyperparallel.train.steps import StepFn
from hyperparallel.train.stop import StopSign, on_signals


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: the steps it did (first to next), their losses, whether it was stopped."""

    first_step: int
    next_step: int
    losses: tuple[float, ...]
    was_stopped: bool


def train(
    config: TrainConfig,
    step_fn: StepFn,
    batches: Batches,
    *,
    rank: int = 0,
    world: int = 1,
    store: Store | None = None,
    sinks: Sequence[Sink] = (),
    plan_hash: str = "",
    stop_asked: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train to `config.steps`, from the newest checkpoint of the run folder where there is one.

    sinks: more places for step records (rank 0), closed at the end; the run folder's own files are
    written as the configuration says. store: how ranks agree on saves and stops (None: the default
    process group's). plan_hash: noted in checkpoints. After SIGTERM or Ctrl-C, or once `stop_asked` says
    so on a rank, the state is saved and the call returns. Raises `CheckpointError` when the run folder
    belongs to other data.
    """
    for field in ("checkpoint_every", "tensorboard"):
        if config.run_folder is None and getattr(config, field):
            raise UserError(field, getattr(config, field), "off, or a run_folder to write to")
    keeper = _keeper(config, rank, world, store)
    sign = StopSign(rank, world, store, stop_asked)
    run = _Run(config, step_fn, batches, keeper, rank, plan_hash)
    try:
        first = run.resume()
        outputs = [*sinks, *_own_sinks(config, first)] if rank == 0 else []
        try:
            with on_signals(sign):
                losses = run.steps(first, sign, outputs)
        finally:
            for output in outputs:
                output.close()
    finally:
        if keeper is not None:
            keeper.close()
    stopped = first + len(losses) < config.steps
    return TrainResult(first, first + len(losses), tuple(losses), stopped)


class _Run:
    """One rank's part of a run."""

    def __init__(
        self,
        config: TrainConfig,
        step_fn: StepFn,
        batches: Batches,
        keeper: Checkpointer | None,
        rank: int,
        plan_hash: str,
    ) -> None:
        self.config, self.step_fn, self.batches = config, step_fn, batches
        self.keeper, self.rank, self.plan_hash = keeper, rank, plan_hash

    def steps(self, first: int, sign: StopSign, outputs: Sequence[Sink]) -> list[float]:
        """Do the steps from `first` on; returns their losses. The last state done is saved."""
        config, losses = self.config, []
        began = time.monotonic()
        saved = first
        for step in range(first, config.steps):
            if sign.before(step):
                break
            record = self._step(step, began)
            losses.append(record.loss)
            for output in outputs:
                output.write(record)
            if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0:
                self.save(step + 1)
                saved = step + 1
        # Also after a stop: the last step done is not lost.
        if first + len(losses) > saved:
            self.save(first + len(losses))
        return losses

    def _step(self, step: int, began: float) -> StepRecord:
        started = time.monotonic()
        lr = learning_rate(self.config, step)
        self.step_fn.set_lr(lr)
        result = self.step_fn.step(next(self.batches))
        loss = float(result["loss"])  # waits for the device
        ended = time.monotonic()
        seconds = max(ended - started, 1e-9)
        return StepRecord(
            step=step,
            loss=loss,
            grad_norm=float(result.get("grad_norm", math.nan)),
            lr=lr,
            tokens_per_second=self.batches.batch_size * self.batches.seq_len / seconds,
            comm_share=float(result.get("comm_seconds", math.nan)) / seconds,
            memory_bytes=peak_memory_bytes(),
            step_seconds=seconds,
            wall_seconds=ended - began,
        )

    def save(self, step: int) -> None:
        """Start a save; does nothing in a run that keeps no checkpoints."""
        if self.keeper is None or not self.config.checkpoint_every:
            return
        meta = {
            "position": self.batches.position,
            "data": self._data_facts(),
            "plan_hash": self.plan_hash,
            "config": self.config.model_dump(mode="json"),
            "step_fn": dict(self.step_fn.facts()),
        }
        state = {**self.step_fn.state(), **random_state(self.rank)}
        self.keeper.save(step, state, meta, self.step_fn.aliases())

    def resume(self) -> int:
        """Load the newest checkpoint and return its step; 0 when there is none to go on from."""
        keeper = self.keeper
        newest = keeper.newest() if keeper is not None and self.config.resume else None
        if keeper is None or newest is None:
            return 0
        index = keeper.read_index(newest)
        saved, here = index.meta.get("data", {}), self._data_facts()
        different = [f"{key} {saved.get(key)}" for key in here if here[key] != saved.get(key)]
        if different:
            given = f"{keeper.folder} (saved with {', '.join(different)})"
            allowed = f"a run on the same data: {here}"
            raise CheckpointError("run_folder", given, allowed, "a new run_folder, or resume=false")
        generators = empty_random_state(index, self.rank)
        # Moments are allocated by the index: an optimizer that has not stepped has none to fill.
        state = {**self.step_fn.state(index), **generators}
        loaded = keeper.load(state, step=index.step, aliases=self.step_fn.aliases())
        self.step_fn.load_state(loaded.meta["step_fn"])
        self.batches.position = loaded.meta["position"]
        # Last: what was built and allocated before may have drawn numbers.
        restore_random_state(generators)
        return loaded.step

    def _data_facts(self) -> dict[str, Any]:
        batches = self.batches
        return {
            "batch_size": batches.batch_size,
            "seq_len": batches.seq_len,
            "seed": batches.seed,
            "tokens": batches.tokens.content_hash,
        }


def _keeper(config: TrainConfig, rank: int, world: int, store: Store | None) -> Checkpointer | None:
    if config.run_folder is None:
        return None
    folder = config.run_folder / "checkpoints"
    return Checkpointer(folder, rank=rank, world=world, store=store, keep=config.checkpoint_keep)


def _own_sinks(config: TrainConfig, first: int) -> list[Sink]:
    if config.run_folder is None:
        return []
    folder: Path = config.run_folder
    sinks: list[Sink] = [MetricsFile(folder / "metrics.jsonl", first)]
    (folder / "config.json").write_text(
        json.dumps(config.model_dump(mode="json"), indent=1), encoding="utf-8"
    )
    if config.tensorboard:
        sinks.append(TensorBoardFolder(folder / "tensorboard", first))
    return sinks
