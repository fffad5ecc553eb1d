"""What the machine looks like, free of torch."""

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.memory_tiers import Tier
from hyperparallel.cluster.rates import Rates
from hyperparallel.cluster.threads import Threads

__all__ = ["Cluster", "Device", "Fabric", "Gemm", "Rates", "Threads", "Tier"]
