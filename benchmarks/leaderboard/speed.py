"""Configurations priced a second on one core: building and pricing, memory included."""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from hyperparallel.cluster.presets import preset
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.memory import memory_of
from hyperparallel.planner.cost.price import step_seconds
from hyperparallel.planner.strategy import Candidates
from hyperparallel.workload.presets import model_preset


def grid(devices: int, experts: bool, layers: int) -> Candidates:
    """Strategies as a search would list them: every power-of-two split of the devices."""
    powers = [2**i for i in range(devices.bit_length())]
    columns: dict[str, list[float]] = {name: [] for name in _AXES}
    for tp, cp, pp, ep in product(powers[:5], powers[:4], powers[:6], powers[:8] if experts else [1]):
        dp = devices // (tp * cp * pp)
        if tp * cp * pp * dp != devices or pp > layers or (tp * cp * dp) % ep:
            continue
        for virtual, micro, zero, recompute in product((1, 2, 4), (1, 2, 4, 8), (1, 3), (0, 1, 2, 3)):
            if (virtual > 1 and pp == 1) or pp * virtual > layers:
                continue
            for name, value in zip(_AXES, (tp, cp, pp, dp, ep, virtual, micro, zero, recompute), strict=True):
                columns[name].append(value)
    return Candidates(**{name: np.array(column, float) for name, column in columns.items()}, sp=1.0)


_AXES = ("tp", "cp", "pp", "dp", "ep", "virtual", "microbatch", "zero", "recompute")


def configurations_per_second(rounds: int = 3) -> dict[str, float]:
    """CPU time counts, so that other work on the machine does not."""
    found = {}
    for name in ("llama3.1-405b", "deepseek-v3"):
        model, cluster = model_preset(name), preset("h100", 8192)
        candidates = grid(8192, name != "llama3.1-405b", model.num_layers)
        best = np.inf
        for _ in range(rounds):
            start = time.process_time()
            rows = rows_of(model, cluster, 8192, 8192.0, candidates)
            step_seconds(rows, Constants())
            memory_of(rows)
            best = min(best, time.process_time() - start)
        found[f"{name}, {len(candidates):,} configurations"] = len(candidates) / best
    return found
