"""What a training run is: one flat set of fields, from a recipe or the command line.

Sizes are global: `batch_size` sequences a step over all ranks, so the same configuration means the
same run on any number of ranks. Unknown fields are refused, with the nearest names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperparallel.errors import UserError, nearest
from hyperparallel.foreign_errors import asked_for


class TrainConfig(BaseModel):
    """One training run; see each field's description (`TrainConfig.model_fields`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("llama-10m", description="recipe name, or path of a Hugging Face config")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="parameters")
    compute: Literal["bfloat16"] | None = Field(None, description="mixed precision; none: as dtype")
    seed: int = Field(0, ge=0, description="of weights, data order and dropout")

    data: Path | None = Field(None, description="file or folder; none: the standard library")
    tokenizer: Path | None = Field(None, description="folder of a tokenizer; none: train one")
    vocab_size: int = Field(4096, ge=257, description="of a trained tokenizer")
    max_text_bytes: int | None = Field(None, ge=1, description="use only the first bytes of text")

    steps: int = Field(100, ge=1, description="optimizer steps in the whole run")
    batch_size: int = Field(8, ge=1, description="sequences a step, over all ranks")
    seq_len: int = Field(128, ge=1, description="tokens a sequence")
    accumulate: int = Field(1, ge=1, description="micro-batches a step, cut from its batch")

    lr: float = Field(1e-3, ge=0, description="largest learning rate")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate / largest")
    warmup_steps: int = Field(10, ge=0, description="steps over which the rate rises")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="of the rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="of AdamW")
    weight_decay: float = Field(0.1, ge=0, description="of AdamW")
    clip_norm: float | None = Field(1.0, gt=0, description="largest gradient norm")

    run_folder: Path | None = Field(None, description="where metrics and checkpoints go")
    checkpoint_every: int = Field(0, ge=0, description="steps between saves; 0: none")
    checkpoint_keep: int = Field(3, ge=0, description="checkpoints that stay; 0: all")
    resume: bool = Field(True, description="go on from the run folder's newest checkpoint")
    trace: Path | None = Field(None, description="file for the timeline of one step (Perfetto)")
    tensorboard: bool = Field(False, description="write TensorBoard files to the run folder")


IDLE = (("min_lr_ratio", "schedule", "constant"), ("checkpoint_keep", "checkpoint_every", 0))
"""(field, other, value): the field does nothing where the other one has that value."""


def make_config(fields: Mapping[str, Any]) -> TrainConfig:
    """A configuration from field values (numbers may be text); raises `UserError` for a bad one.

    >>> make_config({"steps": "20"}).steps
    20
    """
    try:
        config = TrainConfig.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = TrainConfig.model_fields
            close = nearest(name, known)
            allowed = f"one of {', '.join(known)}"
            raise UserError("train config", name, allowed, close) from error
        raise UserError(name, first["input"], asked_for(first)) from error
    for idle, other, value in IDLE:
        if idle in fields and getattr(config, other) == value:
            raise UserError(idle, fields[idle], f"nothing where {other} is {value}, which does without")
    return config


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step `step` (0, 1, ...): a linear rise, then the schedule down to the last step.

    >>> config = make_config({"lr": 1.0, "steps": 30, "warmup_steps": 10, "schedule": "linear"})
    >>> [round(learning_rate(config, step), 3) for step in (0, 9, 10, 29)]
    [0.1, 1.0, 1.0, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps - 1)
    done = min(1.0, done)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "linear":
        height = 1.0 - done
    else:
        height = 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)
