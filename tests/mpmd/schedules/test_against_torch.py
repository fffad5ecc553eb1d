"""Orders of V-shaped schedules against those that torch.distributed.pipelining follows."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from hyperparallel.mpmd import Action, needs_of, schedule
from hyperparallel.mpmd.action import Kind, halved_backwards

KINDS: dict[Any, Kind] = {
    theirs.FORWARD: "F",
    theirs.FULL_BACKWARD: "B",
    theirs.BACKWARD_INPUT: "I",
    theirs.BACKWARD_WEIGHT: "W",
}
CLASSES = {"zb-v": theirs.ScheduleZBVZeroBubble, "dualpipe-v": theirs.ScheduleDualPipeV}


def torch_steps(name: str, stages: int, microbatches: int) -> list[list[tuple[Action, ...]]]:
    """What torch's class computes for every rank, without the stages and groups that it would run; actions
    that it overlaps are one step."""
    one = object.__new__(CLASSES[name])
    one.pp_group_size, one._n_microbatches = stages, microbatches
    one.num_stages = one._num_stages = 2 * stages
    ranks = []
    for rank in range(stages):
        found = [a for a in one._calculate_single_rank_operations(rank) if a is not None]
        parts = [step.sub_actions or (step,) for step in found]
        ranks.append([tuple(named(part) for part in step) for step in parts])
    return ranks


def named(theirs_: Any) -> Action:
    return Action(KINDS[theirs_.computation_type], theirs_.stage_index, theirs_.microbatch_index)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_orders_are_those_of_torch(name: str, stages: int, more: int) -> None:
    count = 2 * stages + more
    steps = torch_steps(name, stages, count)
    assert schedule(name, stages, count) == tuple(tuple(a for step in row for a in step) for row in steps)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("seconds", [(1.0, 1.0), (1.0, 0.5), (2.0, 1.7)])
def test_pairs_that_are_one_action_lose_what_the_paper_says(
    stages: int, seconds: tuple[float, float]
) -> None:
    """(PP/2 - 1)(F&B + B - 3W), the published bubble of DualPipeV, where F = I and F&B = F + B."""
    count, (first, weights) = 2 * stages + 3, seconds
    order = schedule("dualpipe-v", stages, count)
    chunk = {"F": first, "I": first, "W": weights, "B": first + weights}
    halved, end = halved_backwards(order), {}
    todo = torch_steps("dualpipe-v", stages, count)
    clocks = [0.0] * stages
    while any(todo):
        for rank, steps in enumerate(todo):
            while steps:
                needs = [n for a in steps[0] for n in needs_of(a, 2 * stages, halved) if n not in steps[0]]
                if any(need not in end for need in needs):
                    break
                begin = max([clocks[rank], *(end[need] for need in needs)])
                clocks[rank] = begin + sum(chunk[a.kind] for a in steps[0])
                end.update(dict.fromkeys(steps.pop(0), clocks[rank]))
    backward = first + weights
    lost = (stages - 1) * ((first + backward) + backward - 3 * weights)
    assert max(clocks) == pytest.approx(2 * count * (first + backward) + lost)
