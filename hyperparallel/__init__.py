"""Write single-device PyTorch; derive, price, schedule and run the distributed program.

The public names, each loaded on first use: `import hyperparallel` costs nothing; names that describe
or decide (`Mesh`, `Layout`, `Plan`) never load torch, names that run something do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyperparallel.errors import HyperParallelError, RunError, UserError

if TYPE_CHECKING:
    from hyperparallel.graph.capture.capture import Captured, capture
    from hyperparallel.graph.derive import derive
    from hyperparallel.graph.local.localise import register_local_form
    from hyperparallel.graph.parts import Part
    from hyperparallel.graph.region.local_region import local_region
    from hyperparallel.graph.region.user_calls import (
        all_gather,
        all_reduce,
        all_to_all,
        axis_index,
        axis_size,
        broadcast,
        ppermute,
        reduce_scatter,
    )
    from hyperparallel.layout import Layout, Mesh
    from hyperparallel.plan import Plan
    from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
    from hyperparallel.runtime.checkpoint.trained import (
        load_checkpoint,
        load_safetensors,
        save_checkpoint,
        save_safetensors,
    )
    from hyperparallel.runtime.job.launch import launch
    from hyperparallel.runtime.module.certify import certify
    from hyperparallel.runtime.module.parallel import parallelize
    from hyperparallel.runtime.module.parts import PartsStep
    from hyperparallel.runtime.module.step import TrainStep
    from hyperparallel.shard.own_rule import register_rule

__version__ = "0.1.0"

__all__ = [
    "Captured",
    "Checkpointer",
    "HyperParallelError",
    "Layout",
    "Mesh",
    "Part",
    "PartsStep",
    "Plan",
    "RunError",
    "TrainStep",
    "UserError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "capture",
    "certify",
    "derive",
    "launch",
    "load_checkpoint",
    "load_safetensors",
    "local_region",
    "parallelize",
    "ppermute",
    "reduce_scatter",
    "register_local_form",
    "register_rule",
    "save_checkpoint",
    "save_safetensors",
]

_LATE = {
    "Captured": "hyperparallel.graph.capture.capture",
    "Checkpointer": "hyperparallel.runtime.checkpoint.checkpointer",
    "capture": "hyperparallel.graph.capture.capture",
    "Layout": "hyperparallel.layout",
    "Mesh": "hyperparallel.layout",
    "Part": "hyperparallel.graph.parts",
    "PartsStep": "hyperparallel.runtime.module.parts",
    "Plan": "hyperparallel.plan",
    "TrainStep": "hyperparallel.runtime.module.step",
    "certify": "hyperparallel.runtime.module.certify",
    "all_gather": "hyperparallel.graph.region.user_calls",
    "all_reduce": "hyperparallel.graph.region.user_calls",
    "all_to_all": "hyperparallel.graph.region.user_calls",
    "axis_index": "hyperparallel.graph.region.user_calls",
    "axis_size": "hyperparallel.graph.region.user_calls",
    "broadcast": "hyperparallel.graph.region.user_calls",
    "local_region": "hyperparallel.graph.region.local_region",
    "ppermute": "hyperparallel.graph.region.user_calls",
    "reduce_scatter": "hyperparallel.graph.region.user_calls",
    "derive": "hyperparallel.graph.derive",
    "launch": "hyperparallel.runtime.job.launch",
    "load_checkpoint": "hyperparallel.runtime.checkpoint.trained",
    "load_safetensors": "hyperparallel.runtime.checkpoint.trained",
    "parallelize": "hyperparallel.runtime.module.parallel",
    "register_local_form": "hyperparallel.graph.local.localise",
    "register_rule": "hyperparallel.shard.own_rule",
    "save_checkpoint": "hyperparallel.runtime.checkpoint.trained",
    "save_safetensors": "hyperparallel.runtime.checkpoint.trained",
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
