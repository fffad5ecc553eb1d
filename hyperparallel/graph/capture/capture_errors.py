"""Say which line of the user's code stopped the capture, why, and what to write instead."""

from __future__ import annotations

import linecache
import os
import traceback
from pathlib import Path

import torch
from torch import nn

from hyperparallel.errors import CaptureError

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

_REASONS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("DataDependentOutput", "GuardOnDataDependent", "Data dependent", "data-dependent"),
        "reads a tensor's value on the host (item(), bool(), int(), or `if tensor`)",
        "torch.where, or pass the number as a Python argument,",
    ),
    (
        ("DynamicOutputShape", "dynamic shape"),
        "makes a tensor whose shape depends on values (nonzero, boolean indexing, unique)",
        "torch.where or a mask of fixed shape",
    ),
    (
        ("numpy() is not supported", ".numpy()", "from_numpy", "to numpy"),
        "leaves torch for numpy",
        "the torch function of the same name",
    ),
    (
        ("Unhandled FakeTensor Device", "on the same device", "mixing fake modes"),
        "mixes tensors of several devices",
        "one device for the module and the batch",
    ),
)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The deepest frame of `error` that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        f
        for f in frames
        if not os.path.abspath(f.filename).startswith((_OURS, _TORCH))
        and not f.filename.startswith("<")
    ]
    return theirs[-1] if theirs else None


def capture_error(error: BaseException, module: nn.Module) -> CaptureError:
    """A `CaptureError` for what stopped tracing `module`."""
    frame = user_frame(error)
    where = type(module).__name__
    if frame is not None:
        source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        where = (
            f'{where}, file "{frame.filename}", line {frame.lineno}, in {frame.name}: `{source}`'
        )
    text = f"{type(error).__name__}: {error}"
    # By the words of torch's errors: the classes are private, and several routes wrap them.
    for signs, reason, instead in _REASONS:
        if any(sign in text for sign in signs):
            return CaptureError(
                where, f"code that {reason}", "code that runs the same for any values", instead
            )
    first = text.strip().splitlines()[0]
    return CaptureError(where, first, "a forward that runs on this batch without reading values")
