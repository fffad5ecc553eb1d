"""What is to be planned: a model, a machine, a batch and a number format, checked against one another."""

from __future__ import annotations

from dataclasses import dataclass

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.errors import PlanError, nearest
from hyperparallel.planner.strategy import DTYPES
from hyperparallel.workload.model import Model

DEFAULT_SEQ = 4096
DEFAULT_TOKENS = 4 * 2**20
"""Tokens of a step where no batch is given: what large models are trained with."""

SAMPLES_OF_DEVICE = 1 / 8
"""Fewest samples for each device in that batch: with fewer, much of a large machine would stand idle."""


@dataclass(frozen=True)
class PlanningJob:
    """A training step to plan. seq: tokens of a sample. global_batch: samples of a step over all devices.
    dtype: of the weights' matrix products."""

    model: Model
    cluster: Cluster
    seq: int
    global_batch: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for field, value in (("--seq", self.seq), ("--global-batch", self.global_batch)):
            if value < 1:
                raise PlanError(field, value, "1 or more")
        known = [d for d in DTYPES if d in self.cluster.device.peak_flop_s]
        if self.dtype not in known:
            allowed = f"a number format of {self.cluster.device.name}: {', '.join(known)}"
            raise PlanError("--dtype", self.dtype, allowed, self._near_dtype(known))

    def _near_dtype(self, known: list[str]) -> str | None:
        """What to write for a format that the device lacks: the usual one, unless it is only misspelt."""
        usual = next((d for d in ("bf16", *known) if d in known), None)
        return usual if self.dtype in DTYPES else nearest(self.dtype, known, 1) or usual

    @property
    def devices(self) -> int:
        return self.cluster.num_devices

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq * self.global_batch

    @property
    def model_flops(self) -> float:
        """FLOPs of one step that the model needs: three times its forward, the whole square of attention
        (the convention of most published MFU), nothing computed twice, one input of each encoder a sample."""
        model = self.model
        text = model.train_flops_per_token(self.seq, causal=False, mtp=True) * self.tokens
        return text + 3 * self.global_batch * sum(part.flops(causal=False) for part in model.encoders)

    def mfu(self, seconds: float) -> float:
        """Those FLOPs as a share of what all devices could do in that time in the job's number format."""
        return self.model_flops / (seconds * self.devices * self.cluster.device.peak(self.dtype))

    def words(self) -> str:
        """One line for a report."""
        batch = f"{self.global_batch:,} samples of {self.seq:,} tokens a step"
        machine = f"{self.devices:,} x {self.cluster.device.name} ({self.cluster.name})"
        return f"{self.model.name} on {machine}, {batch}"


def default_seq(model: Model) -> int:
    """Tokens of a sample where none are given: 4,096, or what the model can take at most."""
    return min(DEFAULT_SEQ, model.max_seq) if model.max_seq else DEFAULT_SEQ


def default_batch(seq: int, devices: int) -> int:
    """Samples of a step where none are given: about four million tokens, and so many that the machine can be
    used; a power of two times the odd factors of the number of devices, which the data axis must divide.

    >>> default_batch(4096, 64), default_batch(4096, 72)
    (1024, 1152)
    """
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    batch = odd
    while batch < max(DEFAULT_TOKENS / seq, devices * SAMPLES_OF_DEVICE):
        batch *= 2
    return batch
