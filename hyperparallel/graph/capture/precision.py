"""Mixed precision: what computing in bfloat16 means, for a captured program and for one device alike.

It is what `torch.autocast` does on CUDA, on every device: parameters keep their dtype and are cast where
a product uses them; products, and what follows them, are in 16 bits; norms, softmax, sums and losses are
in float32. PyTorch's autocast for the CPU leaves the latter in 16 bits where their operand is, so there
they are named here. A backward op runs in the dtypes of its forward op, so gradients arrive in the dtype
of their parameter.

float16 is left out: its range needs the loss to be scaled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hyperparallel.errors import PlanError, UserError

LOW = (torch.bfloat16, torch.float16)
_DELICATE = """softmax log_softmax softmin layer_norm group_norm instance_norm rms_norm normalize norm
    cosine_similarity logsumexp sum prod cumsum cumprod exp expm1 log log10 log1p log2 pow __pow__ rsqrt
    reciprocal softplus cross_entropy nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy_with_logits var std var_mean std_mean"""
"""Functions that run in float32, wherever torch has them under these names."""


@contextlib.contextmanager
def computing(compute: str | None, device_type: str) -> Iterator[None]:
    """Run a plain module as a plan with this `compute` runs it; None: as it is.

    Only the forward belongs inside, as with `torch.autocast`.

    >>> with computing("bfloat16", "cpu"):
    ...     y = torch.ones(2, 2) @ torch.ones(2, 2)
    ...     print(y.dtype, y.softmax(0).dtype)
    torch.bfloat16 torch.float32
    """
    if compute is None:
        yield
        return
    # CUDA's autocast has the list of float32 functions itself.
    delicate = contextlib.nullcontext() if device_type == "cuda" else _InFloat32()
    with torch.autocast(device_type, getattr(torch, compute)), delicate:
        yield


def check_compute(compute: str | None, params: Mapping[str, Tensor]) -> None:
    """`PlanError` for parameters that are not cast: a product would mix them with bfloat16."""
    wide = next((name for name, x in params.items() if x.dtype == torch.float64), None)
    if compute is not None and wide is not None:
        raise PlanError("compute", compute, f"None, since {wide} is float64", "float32 parameters, or None")


def without_autocast(compute: str | None, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """What surrounds a program, whose casts are written out: no autocast, whatever the caller's loop has.

    Raises `UserError` for an autocast other than the one that the program was built for.
    """
    if not torch.is_autocast_enabled(device_type):
        return _NOTHING
    asked = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    if asked != compute:
        given = f"torch.autocast({device_type!r}, torch.{asked}) around a model with compute={compute!r}"
        raise UserError("autocast", given, "what the plan says", 'Plan(..., compute="bfloat16")')
    # The program has its casts written out; autocast would add its own.
    return torch.autocast(device_type, enabled=False)


_NOTHING = contextlib.nullcontext()


class _InFloat32(TorchFunctionMode):
    """Casts the 16-bit operands of delicate functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FUNCTIONS:
            args = tuple(_wide(x) for x in args)
            kwargs = {key: _wide(x) for key, x in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in LOW else x


# The functions themselves: torch has one under several names, and not every name in every place.
_FUNCTIONS = frozenset(
    found
    for place in (torch, Tensor, F, torch.special, torch.linalg)
    for name in _DELICATE.split()
    if (found := getattr(place, name, None)) is not None
)
