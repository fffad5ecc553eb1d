"""A step on a clock: tasks in, a timeline out; traces that a browser shows and that can be compared."""

from hyperparallel.plan.simulate.cluster_prices import ClusterPrices, ThreadPrices, step_timeline
from hyperparallel.plan.simulate.compare import Comparison, Row, compare
from hyperparallel.plan.simulate.engine import simulate
from hyperparallel.plan.simulate.pipeline import Piece, Pieces, pipeline_tasks
from hyperparallel.plan.simulate.task import Task
from hyperparallel.plan.simulate.timeline import RankTimes, Sample, Span, Timeline
from hyperparallel.plan.simulate.trace import (
    from_chrome_trace,
    read_trace,
    to_chrome_trace,
    write_trace,
)

__all__ = [
    "ClusterPrices",
    "Comparison",
    "Piece",
    "Pieces",
    "RankTimes",
    "Row",
    "Sample",
    "Span",
    "Task",
    "ThreadPrices",
    "Timeline",
    "compare",
    "from_chrome_trace",
    "pipeline_tasks",
    "read_trace",
    "simulate",
    "step_timeline",
    "to_chrome_trace",
    "write_trace",
]
