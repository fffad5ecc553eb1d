"""Seconds and bytes of one strategy by layer, from the rows that the closed form prices.

Layers of every kind are priced under every recomputation, so that stages may mix them (`stages.py`). Saved
bytes are means over kinds. Left out: what depends on the order of actions, which `simulated_step.py` follows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hyperparallel.planner.cost.collectives import PRICED_KINDS, collective_seconds
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.cost.memory import Memory, microbatches_held
from hyperparallel.planner.cost.price import SegmentTimes, cold_seconds, pass_seconds
from hyperparallel.planner.cost.rows import FRONT, HEAD
from hyperparallel.planner.job import PlanningJob
from hyperparallel.planner.search.table import StrategyTable
from hyperparallel.planner.step.link_load import shares, tier_names
from hyperparallel.planner.step.stages import layer_kinds
from hyperparallel.planner.strategy import RECOMPUTE, Candidates, Strategy


class Pass(NamedTuple):
    """Seconds of one layer (or head) in one pass."""

    compute: float
    tensor: float
    experts: float
    gather: float
    hidden: float
    hidden_gather: float
    copy: float = 0.0
    hidden_copy: float = 0.0

    def scaled(self, factor: float) -> Pass:
        return Pass._make(value * factor for value in self)

    def plus(self, other: Pass) -> Pass:
        return Pass._make(a + b for a, b in zip(self, other, strict=True))


NO_PASS = Pass(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class LayerPrices:
    """Seconds and bytes of a layer of every kind under every recomputation, for one strategy."""

    def __init__(self, job: PlanningJob, strategy: Strategy, constants: Constants) -> None:
        self.job, self.strategy, self.constants = job, strategy, constants
        every = [replace(strategy, recompute=r) for r in RECOMPUTE]  # type: ignore[arg-type]
        self.table = StrategyTable(job, Candidates.of(every), constants)
        self.times: SegmentTimes = self.table.times()
        self.row = {name: column[0] for name, column in self.table.rows.row.items()}
        self.own_row = RECOMPUTE.index(strategy.recompute)

    @cached_property
    def memory(self) -> Memory:
        """In closed form, a row for each recomputation."""
        return self.table.memory()

    def _pass(self, segment: int, recompute: str) -> Pass:
        # Segments are the outer index, the rows of this table (one a recomputation) the inner one.
        i = segment * len(RECOMPUTE) + RECOMPUTE.index(recompute)
        t = self.times
        # `travel` has both, exposed or not.
        shown = t.tensor[i] + t.dispatch[i]
        return Pass(
            float(t.compute[i]),
            float(t.tensor[i]),
            float(t.dispatch[i]),
            float(t.fsdp[i]),
            max(float(t.travel[i] - shown), 0.0),
            max(float(t.gather[i] - t.fsdp[i]), 0.0) if self.strategy.zero == 3 else 0.0,
        )

    def forward(self, kind: int, action: str = "none") -> Pass:
        """Of a layer whose saved activations are treated like that (`ACTIONS`)."""
        return self._beside_copy(self._pass(3 * kind, "none"), action, 0)

    def backward(self, kind: int, action: str = "none") -> Pass:
        """The same without what is computed again."""
        return self._beside_copy(self._pass(3 * kind + 1, "none"), action, 1)

    def again(self, kind: int, action: str) -> Pass:
        """What is computed again in the backward."""
        return NO_PASS if action in ("none", "offload") else self._pass(3 * kind + 2, action)

    def _beside_copy(self, one: Pass, action: str, way: int) -> Pass:
        """With saved activations going to host memory (way 0) or coming back (1) beside the layer."""
        if action != "offload":
            return one
        host = self.job.cluster.tier("host")
        read, write = host.contended()
        seconds = host.latency_s + self.saved_bytes("none") / (read if way else write)
        shown = max(seconds - one.compute - one.tensor - one.experts, 0.0)
        return one._replace(copy=shown, hidden_copy=seconds - shown)

    def head(self) -> Pass:
        """Head and loss with those of extra predictions, forward and backward."""
        return self._end(HEAD)

    def front(self) -> Pass:
        """Encoders in front of the first stage, forward and backward."""
        return self._end(FRONT)

    def _end(self, which: int) -> Pass:
        rows = self.table.rows
        whole = NO_PASS
        for i in np.flatnonzero((rows.segment_pass == which) & (rows.segment_row == 0)):
            part = self._pass(int(i) // len(RECOMPUTE), self.strategy.recompute)
            whole = whole.plus(part.scaled(float(rows.segment_layers[i])))
        return whole

    def layer(self, kind: int, action: str) -> float:
        """All exposed seconds of a layer and microbatch."""
        whole = self.forward(kind, action).plus(self.backward(kind, action)).plus(self.again(kind, action))
        return whole.compute + whole.tensor + whole.experts + whole.gather + whole.copy

    def cold_share(self) -> float:
        """What the pipeline loses once a step, of a mean rank's seconds for a microbatch."""
        action, kinds, r = self.strategy.recompute, layer_kinds(self.job), self.table.rows.row
        passes = [
            np.array(sum(p.compute + p.tensor + p.experts + p.gather for p in found))
            for found in (
                [self.forward(kind) for kind in kinds],
                [self.backward(kind) for kind in kinds],
                [self.again(kind, action) for kind in kinds],
            )
        ]
        p, m, v, schedule = (r[name][:1] for name in ("pp", "microbatches", "virtual", "schedule"))
        return float(cold_seconds(p, m, v, schedule, pass_seconds(*passes))[0] / sum(passes))

    def saved_bytes(self, action: str) -> float:
        """Kept on the device from forward to backward by one layer, a mean over kinds."""
        if action == "offload":
            return 0.0
        return float(self.table.rows.row["saved_bytes"][RECOMPUTE.index(action)])

    def own_saved(self) -> float:
        """As the strategy itself recomputes."""
        return self.saved_bytes(self.strategy.recompute)

    def in_flight(self) -> float:
        """Microbatches whose activations the first stage holds."""
        r = self.table.rows.row
        held = microbatches_held(r["pp"], r["microbatches"], r["virtual"], r["schedule"])
        return float(held[0])

    def host_bytes(self) -> float:
        """Of optimizer states in host memory."""
        return float(self.memory.host[0])

    def layer_state_bytes(self) -> float:
        """Parameters, gradients and optimizer states on the device of one layer, a mean over layers."""
        memory, r = self.memory, self.row
        held = float(memory.parameters[0] + memory.gradients[0] + memory.optimizer[0])
        inside = r["params"] - r["embedding"] - r["front_params"] + r["expert_params"]
        share = max(float(inside / (r["params"] + r["expert_params"])), 0.0)
        return held * share * float(r["pp"] / r["layers"])

    def static_bytes(self) -> tuple[float, float]:
        """(states and overhead, working) of the fullest rank."""
        memory, i = self.memory, self.own_row
        held = memory.parameters[i] + memory.gradients[i] + memory.optimizer[i] + memory.overhead[i]
        return float(held), float(memory.working[i])

    def overhead_bytes(self) -> float:
        """What is on the device whatever the plan."""
        return float(self.memory.overhead[self.own_row])

    def working_bytes(self, last: bool) -> float:
        """Of a stage that runs backward; the last one has the logits too."""
        r, (_, working) = self.table.rows.row, self.static_bytes()
        if not last or self.strategy.pp == 1:
            return working
        i = self.own_row
        return max(working, float(r["logit_bytes"][i] * r["logits"][i] + r["norm_bytes"][i]))

    def front_saved_bytes(self) -> float:
        """What encoders keep of a microbatch."""
        return float(self.table.rows.row["front_saved"][self.own_row])

    def boundary_seconds(self) -> float:
        """Of an activation or gradient that goes to the next stage."""
        groups = self.table.rows.groups["pp"].take(np.array([0]))
        sent = np.array([self.row["boundary_bytes"]])
        kind = np.array([float(PRICED_KINDS.index("send"))])
        return float(collective_seconds(kind, sent, groups, self.constants)[0])

    def demand(self, axis: str, kind: str, rank: int, seconds: float, num_bytes: float) -> dict[str, float]:
        """Shares of the rank's links that a message of that axis takes."""
        found = shares(PRICED_KINDS.index(kind), num_bytes, self.table.rows.groups[axis], 0, seconds)
        names = tier_names(self.job.cluster)
        return {f"{names[i]} of {rank}": float(x) for i, x in enumerate(found[: len(names)]) if x > 0.0}
