"""What the model computes: op and value records, free of torch."""

from hyperparallel.workload.ops import Op, Ref, Value, Workload

__all__ = ["Op", "Ref", "Value", "Workload"]
