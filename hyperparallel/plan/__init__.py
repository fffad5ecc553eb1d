"""What the user declares, and what is decided from it."""

from hyperparallel.plan.derived import Derived
from hyperparallel.plan.plan import Plan

__all__ = ["Derived", "Plan"]
