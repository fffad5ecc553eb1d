"""Run a derived program: the public names, loaded on first use (some of them start slowly)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperparallel.graph.derive import derive
    from hyperparallel.runtime.certify import Certificate, certify
    from hyperparallel.runtime.launch import launch
    from hyperparallel.runtime.parallel import parallelize
    from hyperparallel.runtime.step import StepResult, TrainStep

__all__ = [
    "Certificate",
    "StepResult",
    "TrainStep",
    "certify",
    "derive",
    "launch",
    "parallelize",
]

_LATE = {
    "Certificate": "hyperparallel.runtime.certify",
    "StepResult": "hyperparallel.runtime.step",
    "TrainStep": "hyperparallel.runtime.step",
    "certify": "hyperparallel.runtime.certify",
    "derive": "hyperparallel.graph.derive",
    "launch": "hyperparallel.runtime.launch",
    "parallelize": "hyperparallel.runtime.parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
