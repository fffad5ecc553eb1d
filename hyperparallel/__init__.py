"""Write single-device PyTorch; derive, price, schedule and run the distributed program.

The public names, each loaded on first use: `import hyperparallel` costs nothing; names that describe
or decide (`Mesh`, `Layout`, `Plan`) never load torch, names that run something do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyperparallel.errors import HyperParallelError, RunError, UserError

if TYPE_CHECKING:
    from hyperparallel.graph.capture import Captured, capture
    from hyperparallel.graph.derive import derive
    from hyperparallel.layout import Layout, Mesh
    from hyperparallel.plan import Plan
    from hyperparallel.runtime.certify import certify
    from hyperparallel.runtime.launch import launch
    from hyperparallel.runtime.parallel import parallelize
    from hyperparallel.runtime.step import TrainStep

__version__ = "0.1.0"

__all__ = [
    "Captured",
    "HyperParallelError",
    "Layout",
    "Mesh",
    "Plan",
    "RunError",
    "TrainStep",
    "UserError",
    "__version__",
    "capture",
    "certify",
    "derive",
    "launch",
    "parallelize",
]

_LATE = {
    "Captured": "hyperparallel.graph.capture",
    "capture": "hyperparallel.graph.capture",
    "Layout": "hyperparallel.layout",
    "Mesh": "hyperparallel.layout",
    "Plan": "hyperparallel.plan",
    "TrainStep": "hyperparallel.runtime.step",
    "certify": "hyperparallel.runtime.certify",
    "derive": "hyperparallel.graph.derive",
    "launch": "hyperparallel.runtime.launch",
    "parallelize": "hyperparallel.runtime.parallel",
}
"""Public name -> the module it is loaded from on first use."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
