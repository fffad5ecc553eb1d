"""The step of a recipe's run, predicted: what `hyperparallel plan --mesh ... --trace FILE` writes.

The optimizer and the limit on the gradient norm are those that `hyperparallel train` would use, so the trace
can be laid beside the one that it measures (`hyperparallel compare`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hyperparallel.cli.request import Request

if TYPE_CHECKING:
    from hyperparallel.graph.build import Built


def write_prediction(request: Request, built: Built, cluster: str, path: Path) -> str:
    """Simulate a step of a built request on a cluster (preset or file), write it; one sentence about it."""
    from hyperparallel.cluster.load import load_cluster
    from hyperparallel.graph.predict.predict import predicted_step
    from hyperparallel.graph.predict.update_work import update_work
    from hyperparallel.plan.wording import seconds_words
    from hyperparallel.simulate import write_trace
    from hyperparallel.train.job import adamw

    config = request.config
    update = update_work(lambda named: adamw(config, named))
    machine = load_cluster(cluster)
    clip = config.clip_norm is not None
    found = predicted_step(built, machine, runs=config.accumulate, clip=clip, update=update)
    write_trace(found, path)
    return f"predicted step on {machine.name}: {seconds_words(found.step_seconds)}; saved {path}"
