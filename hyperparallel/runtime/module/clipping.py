"""The norm of all gradients of a model, and gradients scaled to a largest one.

The norm counts every element once, whatever its layout and mesh: local squares are divided by the number of
ranks that hold the same piece and summed over all ranks, so every rank gets the same number and takes the
same decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperparallel.errors import PlanError
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.exec.codegen import WaitClock
from hyperparallel.runtime.job.here import Here
from hyperparallel.shard.spec import Spec, ways


def check_clip(clip: float | None) -> None:
    """Refuse a norm that gradients cannot be scaled to."""
    if clip is not None and (not isinstance(clip, (int, float)) or not clip > 0):
        raise PlanError("clip", clip, "a norm above 0, or None")


def copies_of(spec: Spec) -> float:
    """How many ranks hold the same piece."""
    return spec.mesh.size / ways(spec.axes, spec.mesh)


def clip_gradients(
    grads: Sequence[Tensor], copies: Sequence[float], limit: float, here: Here, clock: WaitClock
) -> Tensor:
    """Scale this rank's gradients so that the norm of all ranks' is at most `limit`; returns the norm before.

    grads: local pieces, none on a rank that trains nothing. copies: of each, see `copies_of`. clock: counts
    the time spent waiting. Every rank of `here.mesh` must call this.
    """
    squares = torch.zeros((), dtype=torch.float64, device=here.device)
    if grads:
        # In float64: the square of 256 overflows in float16.
        norms = torch.stack(torch._foreach_norm(list(grads))).double()
        squares = (norms.square() / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()
    started = collectives.all_reduce_start(squares, "sum", here.mesh_group)
    total = clock.wait(started).sqrt()
    if grads:
        # As torch.nn.utils.clip_grad_norm_ does, its 1e-6 too.
        scale = torch.clamp(limit / (total + 1e-6), max=1.0).to(grads[0].dtype)
        torch._foreach_mul_(list(grads), scale)
    return total
