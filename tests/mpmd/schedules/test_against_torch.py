"""Orders of V-shaped schedules against those that torch.distributed.pipelining follows."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as theirs

from hyperparallel.mpmd import Schedule, schedule

KINDS = {
    theirs.FORWARD: "F",
    theirs.FULL_BACKWARD: "B",
    theirs.BACKWARD_INPUT: "I",
    theirs.BACKWARD_WEIGHT: "W",
}
CLASSES = {"zb-v": theirs.ScheduleZBVZeroBubble}


def torch_order(name: str, stages: int, microbatches: int) -> Schedule:
    """What torch's class computes for every rank, without the stages and groups that it would run."""
    one = object.__new__(CLASSES[name])
    one.pp_group_size, one._n_microbatches = stages, microbatches
    one.num_stages = one._num_stages = 2 * stages
    ranks = []
    for rank in range(stages):
        actions = [a for a in one._calculate_single_rank_operations(rank) if a is not None]
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        found = ((KINDS[p.computation_type], p.stage_index, p.microbatch_index) for p in parts)
        ranks.append(tuple(action for action in found if action[2] < microbatches))
    return tuple(ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_orders_are_those_of_torch(name: str, stages: int, more: int) -> None:
    count = 2 * stages + more
    assert schedule(name, stages, count) == torch_order(name, stages, count)
