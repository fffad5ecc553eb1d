"""A step on a clock: tasks in, a timeline out; traces that a browser shows and that can be compared."""

from hyperparallel.simulate.cluster_prices import ClusterPrices, ThreadPrices, step_timeline
from hyperparallel.simulate.compare import Comparison, Row, compare
from hyperparallel.simulate.engine import simulate
from hyperparallel.simulate.pipeline import TaskPart, TaskParts, pipeline_tasks
from hyperparallel.simulate.task import Task
from hyperparallel.simulate.timeline import RankTimes, Sample, Span, Timeline
from hyperparallel.simulate.trace import (
    from_chrome_trace,
    read_trace,
    to_chrome_trace,
    write_trace,
)

__all__ = [
    "ClusterPrices",
    "Comparison",
    "RankTimes",
    "Row",
    "Sample",
    "Span",
    "Task",
    "TaskPart",
    "TaskParts",
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
