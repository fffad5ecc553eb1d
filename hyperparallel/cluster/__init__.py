"""What the machine looks like, free of torch."""

from hyperparallel.cluster.rates import Rates

__all__ = ["Rates"]
