"""The block and training benchmarks: every row of ours over both transports, collectives counted right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import run_ranks
from benchmarks.shard import counting, ours, rows, training, training_rows
from hyperparallel.runtime.comm import collectives

TENSORS = 3


def _ours(names: Any) -> set[str]:
    return {name for name in names if name.startswith("hyperparallel")}


@pytest.mark.fake
def test_every_row_of_ours_stands_over_both_transports_and_beside_its_peer() -> None:
    block = {row.name: row.transport for row in rows.ROWS}
    trained = {name: row.transport for name, row in training_rows.ROWS.items()}
    for known in (block, trained):
        own = {name for name in _ours(known) if known[name] == "own"}
        assert own and _ours(known) == own | {f"{name}, over gloo" for name in own}
        assert all(known[f"{name}, over gloo"] == "gloo" for name in own)
        assert all(known[name] != "own" for name in known.keys() - _ours(known))
    together = [names for _, names in training.experiments(2)]
    assert set().union(*together) == set(trained)
    for names in together:
        assert all(training_rows.ROWS[name].peer in names for name in _ours(names))


def _counted() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plan = ours.block_plan(2)
    for transport in ours.TRANSPORTS:
        group = ours.here(plan.mesh, transport).groups.world
        found[transport] = type(group.transport).__name__

        def step(group: Any = group) -> None:
            for _ in range(TENSORS):
                collectives.wait(collectives.all_reduce_start(torch.ones(4), "sum", group))
            collectives.wait(collectives.all_gather_start(torch.ones(4), 0, (4, 4), group))

        found[f"{transport} step"] = counting.of_training(step, 2).counts

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(TENSORS)))
    # Buckets of one matrix each; DDP settles them in its second step.
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=64 * 64 * 4 / 2**20)
    for _ in range(3):
        ddp(torch.ones(2, 64)).sum().backward()
    found["ddp"] = counting.of_training(lambda: ddp(torch.ones(2, 64)).sum().backward(), 2).counts
    dist.barrier()
    return found


@pytest.mark.procs
def test_collectives_are_counted_whoever_posts_them() -> None:
    for found in run_ranks(2, _counted):
        assert found["own"] == "SharedMemoryTransport" and found["gloo"] == "ProcessGroupTransport"
        for transport in ours.TRANSPORTS:
            assert found[f"{transport} step"] == {"all_reduce": TENSORS, "all_gather": 1}
        assert found["ddp"] == {"all_reduce": TENSORS}
