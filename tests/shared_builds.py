"""Programs that a test builds once, before it forks the ranks that run them.

Every rank of a job captures the model and decides for itself, the same on all. A second of that a plan is
nothing to a user, but 4 ranks on 2 cores make it two, for every plan of every test. Ranks of other tests
(launched by `run_ranks` alone) do it themselves, so that is tested too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hyperparallel.graph.build import Built, build
from hyperparallel.graph.capture.batch_tree import flatten
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from hyperparallel.runtime.comm.groups import Groups
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module import joint, parallel, step


@contextmanager
def shared_builds(num_ranks: int, rehearse: Callable[[Here], Any]) -> Iterator[None]:
    """Inside, `parallelize` and `TrainStep` find what `rehearse` has built; what it has not, they build.

    rehearse: makes what the ranks will make, as rank 0 of `num_ranks` and without peers.
    """
    known: dict[str, Built] = {}

    def shared(module: nn.Module, plan: Plan, args: Any = (), kwargs: Any = None, **options: Any) -> Built:
        key = repr((_signature(module), plan, _batch((args, kwargs)), sorted(options.items())))
        if key not in known:
            known[key] = build(module, plan, args, kwargs, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "build", shared)
        patch.setattr(step, "build", shared)
        with pytest.MonkeyPatch.context() as alone:  # no peers yet to agree with
            alone.setattr(parallel, "agree", lambda *words: None)
            alone.setattr(joint, "agree", lambda *words: None)
            alone.setattr(step, "agree", lambda *words: None)
            mesh = Mesh((num_ranks,), ("ranks",))
            rehearse(Here(0, mesh, torch.device("cpu"), Groups(0, num_ranks)))
        yield


def _signature(module: nn.Module) -> Any:
    """A module's parts, with their settings as far as they print them, modes and tensors."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    return repr(module), [part.training for part in module.modules()], list(tensors), _batch(tensors)


def _batch(batch: Any) -> Any:
    """The nesting and plain values of a batch, and its tensors without their numbers."""
    tree, leaves = flatten(batch)
    return repr(tree.outline()), [(x.shape, x.dtype, x.requires_grad) for x in leaves]
