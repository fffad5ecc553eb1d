"""The closed forms of bubbles and memory against following the schedules' orders."""

from __future__ import annotations

import numpy as np
import pytest

from hyperparallel.errors import PlanError
from hyperparallel.mpmd import (
    SCHEDULES,
    Schedule,
    Times,
    bubble_share,
    homes,
    in_flight,
    most_in_flight,
    timed,
)
from hyperparallel.mpmd import schedule as make

pytestmark = pytest.mark.pure
CASES = [
    (name, stages, virtual, groups)
    for name, record in sorted(SCHEDULES.items())
    for virtual in (1, 2, 3)
    if record.chunks(virtual)
    for stages in (1, 2, 3, 4, 8)
    for groups in (2, 3, 8)
]
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (1.0, 1.2, 0.8), (0.9, 1.0, 0.9), (1.0, 2.0, 0.1)]


def followed(order: Schedule, costs: tuple[float, float, float]) -> Times:
    first, second, third = costs
    seconds = {"F": first, "B": second + third, "I": second, "W": third}
    chunks = len(homes(order)) / len(order)
    return timed(order, lambda action: seconds[action.kind] / chunks)


@pytest.mark.parametrize(("name", "stages", "virtual", "groups"), CASES)
def test_bubble_of_a_step(name: str, stages: int, virtual: int, groups: int) -> None:
    order = make(name, stages, stages * groups, virtual)
    for costs in COSTS:
        named = dict(zip(("forward", "input_grad", "weight_grad"), costs, strict=True))
        share = bubble_share(name, stages, stages * groups, virtual, **named)
        assert followed(order, costs).idle_share(stages) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"gpipe"}))
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("costs", COSTS)
def test_bubble_of_ranks_that_go_on_alone(name: str, stages: int, costs: tuple[float, float, float]) -> None:
    """From a rank's first action to its last: how the zero-bubble papers count."""
    order = make(name, stages, 3 * stages)
    times = followed(order, costs)
    longest = max(times.end[actions[-1]] - times.begin[actions[0]] for actions in order)
    named = dict(zip(("forward", "input_grad", "weight_grad"), costs, strict=True))
    share = bubble_share(name, stages, 3 * stages, together=False, **named)
    assert 1 - 3 * stages * sum(costs) / longest == pytest.approx(share, abs=1e-12)


def test_zero_bubble() -> None:
    """With F = I = W nothing is lost, in the memory of 1F1B (zb-v) or twice that (zb-h2)."""
    for name in ("zb-h2", "zb-v"):
        assert bubble_share(name, 8, 32, together=False) == 0.0
    assert bubble_share("zb-h1", 8, 32, together=False) == pytest.approx(7 / (96 + 7))
    assert max(in_flight(make("zb-v", 8, 32))) == 2 * max(in_flight(make("1f1b", 8, 32)))
    assert max(in_flight(make("zb-h1", 8, 32))) == max(in_flight(make("1f1b", 8, 32)))


def test_gpipe_has_the_bubble_of_1f1b_and_more_memory() -> None:
    assert bubble_share("gpipe", 4, 16) == bubble_share("1f1b", 4, 16) == 3 / 19
    assert max(in_flight(make("gpipe", 4, 16))) == 16
    assert max(in_flight(make("1f1b", 4, 16))) == 4


@pytest.mark.parametrize(("name", "stages", "virtual", "groups"), CASES)
def test_most_in_flight(name: str, stages: int, virtual: int, groups: int) -> None:
    order = make(name, stages, stages * groups, virtual)
    closed = [most_in_flight(name, stages, stages * groups, virtual, r) for r in range(stages)]
    assert list(in_flight(order)) == closed


def test_closed_forms_take_arrays() -> None:
    stages, microbatches = np.array([2, 4, 8]), np.array([4, 2, 64])
    for name in SCHEDULES:
        shares = bubble_share(name, stages, microbatches, forward=np.array([1.0, 1.0, 2.0]))
        alone = [bubble_share(name, p, m, forward=f)
                 for p, m, f in zip((2, 4, 8), (4, 2, 64), (1.0, 1.0, 2.0), strict=True)]  # fmt: skip
        np.testing.assert_allclose(shares, alone)
        held = most_in_flight(name, stages, microbatches)
        assert held.tolist() == [most_in_flight(name, p, m) for p, m in ((2, 4), (4, 2), (8, 64))]


def test_unknown_names() -> None:
    for closed in (bubble_share, most_in_flight):
        with pytest.raises(PlanError, match="write zb-h1 instead"):
            closed("zbh1", 2, 2)


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 3), ("zb-h1", 2), ("zb-v", 1), ("1f1b", 0)])
def test_chunks_that_a_schedule_cannot_have(name: str, virtual: int) -> None:
    for form in (bubble_share, most_in_flight):
        with pytest.raises(PlanError, match=f"virtual: got {virtual}; allowed: . for {name}"):
            form(name, 4, 12, virtual)
        with pytest.raises(PlanError, match="virtual"):
            form(name, 4, 12, np.array([virtual]))
