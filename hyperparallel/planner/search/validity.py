"""Where a prediction extrapolates: the ranges of what the model was fitted to, and what it does not price.

The ranges are those of the published runs in `benchmarks/leaderboard`. Outside them the equations still hold
together, but nobody has measured how wrong they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.table import Prediction
from hyperparallel.workload.model import Attention

FITTED_CLUSTERS = ("a100", "h100", "b200", "b300", "gb200-nvl72", "gb300-nvl72", "ascend-910b")
FITTED_DTYPES = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
FITTED_HIDDEN = (1024, 25600)
FITTED_SEQ = (512, 131072)
VALIDATED_DEVICES = 8192
VALIDATED_SCHEDULES = ("1f1b",)
"""Of pipelines: no row of the published runs (`benchmarks/leaderboard`) has another."""

TIGHT = 0.95
"""Share of the memory above which a prediction that is 5 % off decides whether it fits."""


def warnings(job: PlanningJob, best: Prediction) -> Iterator[str]:
    """Sentences, the weightiest first."""
    cluster, model = job.cluster, job.model
    if job.devices > VALIDATED_DEVICES:
        yield (
            f"{job.devices:,} devices: consistency-checked, not validated (published runs end at "
            f"{VALIDATED_DEVICES:,})"
        )
    if cluster.name not in FITTED_CLUSTERS:
        fitted = ", ".join(FITTED_CLUSTERS)
        yield f"{cluster.name}: no published run of this machine was fitted (fitted: {fitted})"
    if job.dtype not in FITTED_DTYPES:
        yield f"{job.dtype}: fitted to {', '.join(FITTED_DTYPES)}"
    strategy = best.strategy
    if strategy.pp > 1 and strategy.schedule not in VALIDATED_SCHEDULES:
        validated = ", ".join(VALIDATED_SCHEDULES)
        yield (
            f"{strategy.schedule}: consistency-checked by following its order, not validated (published runs "
            f"of pipelines have {validated})"
        )
    for name, value, (low, high) in (
        ("hidden size", model.hidden, FITTED_HIDDEN),
        ("sequence", job.seq, FITTED_SEQ),
    ):
        if not low <= value <= high:
            yield f"{name} {value:,} lies outside the fitted {low:,} to {high:,}"
    if model.max_seq and job.seq > model.max_seq:
        yield f"{job.seq:,} tokens are more than the model's {model.max_seq:,}"
    if best.peak_bytes > TIGHT * cluster.capacity_bytes:
        share = best.peak_bytes / cluster.capacity_bytes
        yield f"memory {share:.0%} full: an error of a few per cent decides whether it fits"
    if model.encoders:
        params = sum(part.params for part in model.encoders)
        yield (
            f"encoders in front ({params / 1e9:.2f} B parameters) are priced for one input a sample, trained "
            "along, in the first stage"
        )
    mixers = [layer.attention for layer, _ in model.kinds if layer.attention is not None]
    if any(not isinstance(mixer, Attention) for mixer in mixers):
        yield "recurrent layers are priced as chunked products; no published run of them was fitted"
    yield from cluster.notes
