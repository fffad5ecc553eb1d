"""The step that the loop drives, and two makers of it: one device, and a sharded `TrainStep`.

The loop needs few things of a step: do one, take a learning rate, and show its state as named
tensors that a checkpoint can save or fill in place. Names and facts are the same for both makers,
so a run that was saved by one goes on with the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn

from hyperparallel.graph.capture.precision import computing
from hyperparallel.runtime.checkpoint.held import step_parameters
from hyperparallel.runtime.checkpoint.index import Index
from hyperparallel.runtime.checkpoint.model import (
    module_parameters,
    module_state,
    optimizer_state,
    prepare_optimizer,
    restore_settings,
)
from hyperparallel.runtime.checkpoint.record import StateValue
from hyperparallel.runtime.module.step import TrainStep


class StepFn(Protocol):
    """One optimizer step on a global batch, and the state behind it."""

    def step(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Update; returns `loss`, and where known `grad_norm` and `comm_seconds`."""

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next steps."""

    def state(self, index: Index | None = None) -> Mapping[str, StateValue]:
        """The live tensors by name; those of `index`, a checkpoint, are allocated first."""

    def facts(self) -> Mapping[str, Any]:
        """What JSON can hold of the state, saved beside the tensors."""

    def load_state(self, facts: Mapping[str, Any]) -> None:
        """Called when the tensors of `state` were filled, with the facts saved beside them."""

    def aliases(self) -> Mapping[str, str]:
        """Other name -> name of each tied tensor."""


class _OptimizerStep:
    """What both makers share: a module to show, an optimizer over named parameters."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, StateValue],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.module, self.parameters, self.optimizer = module, parameters, optimizer

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state(self, index: Index | None = None) -> Mapping[str, StateValue]:
        if index is not None:
            prepare_optimizer(self.parameters, self.optimizer, index)
        tensors, _ = module_state(self.module)
        moments, _ = optimizer_state(self.parameters, self.optimizer)
        return tensors | moments

    def facts(self) -> Mapping[str, Any]:
        return optimizer_state(self.parameters, self.optimizer)[1]

    def load_state(self, facts: Mapping[str, Any]) -> None:
        restore_settings(self.parameters, self.optimizer, facts)

    def aliases(self) -> Mapping[str, str]:
        return module_state(self.module)[1]


class SingleDeviceStep(_OptimizerStep):
    """A plain module whose result has a `loss`, trained on one device; compute: as of a `Plan`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = None,
        compute: str | None = None,
    ) -> None:
        super().__init__(module, dict(module_parameters(module)), optimizer)
        self.clip_norm, self.compute = clip_norm, compute

    def step(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        with computing(self.compute, next(iter(batch.values())).device.type):
            result = self.module(**batch)
        loss = result["loss"] if isinstance(result, Mapping) else result.loss
        loss.backward()
        norm = math.nan
        if self.clip_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm))
        self.optimizer.step()
        return {"loss": float(loss.detach()), "grad_norm": norm, "comm_seconds": 0.0}


class ShardedStep(_OptimizerStep):
    """A `TrainStep`: its optimizer's local tensors are saved as pieces of whole moments."""

    def __init__(self, train_step: TrainStep) -> None:
        super().__init__(train_step.model, step_parameters(train_step), train_step.optimizer)
        self.train_step = train_step

    def step(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        return asdict(self.train_step.step(batch))
