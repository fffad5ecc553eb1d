"""Schedules: the orders that papers print, what the check refuses, and random orders against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperparallel.errors import PlanError
from hyperparallel.mpmd import (
    SCHEDULES,
    Action,
    Receive,
    Schedule,
    Send,
    check_schedule,
    homes,
    in_flight,
    lowered,
    most_in_flight,
    schedule,
    timed,
)

pytestmark = pytest.mark.pure
CASES = [(name, v) for name, record in sorted(SCHEDULES.items()) for v in (1, 2, 3) if record.chunks(v)]


def words(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def test_orders_as_printed() -> None:
    """Figure 4 of Narayanan et al. 2021, and figure 3 of Qi et al. 2024, first stages."""
    assert words(schedule("1f1b", 4, 8)[3])[:31] == "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F"
    assert words(schedule("gpipe", 2, 2)[0]) == "F0.0 F0.1 B0.1 B0.0"
    first = schedule("1f1b", 4, 8, 2)[0]
    assert words(first[:10]) == "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5"
    assert words(first[10:14]) == "F0.6 B4.0 F0.7 B4.1"
    assert words(schedule("zb-h1", 4, 8)[0][:8]) == "F0.0 F0.1 F0.2 F0.3 I0.0 W0.0 F0.4 I0.1"


@pytest.mark.parametrize(("name", "virtual"), CASES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_named_schedules_can_be_run(name: str, virtual: int, stages: int, groups: int) -> None:
    order = schedule(name, stages, stages * groups, virtual)
    check_schedule(order)
    assert len(order) == stages
    assert homes(order) == SCHEDULES[name].homes(stages, virtual)
    limits = [most_in_flight(name, stages, stages * groups, virtual, r) for r in range(stages)]
    check_schedule(order, most=limits)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_few_microbatches_can_be_run(name: str, microbatches: int) -> None:
    check_schedule(schedule(name, 4, microbatches))


@pytest.mark.parametrize(("name", "virtual"), CASES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("groups", [2, 3, 5])
def test_records_say_what_their_orders_do(name: str, virtual: int, stages: int, groups: int) -> None:
    record = SCHEDULES[name]
    order = schedule(name, stages, stages * groups, virtual)
    assert record.splits == any(action.kind == "I" for actions in order for action in actions)
    assert record.last_rank(stages, virtual) == homes(order)[-1]
    held = in_flight(order, weight=lambda stage: float(stage == 0))[0]
    assert record.held_first(stages, stages * groups, virtual) == held
    assert record.serves(stages, stages * groups, virtual) == (groups >= record.least_rounds)


def test_names_are_those_of_the_records() -> None:
    assert all(name == record.name for name, record in SCHEDULES.items())


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "virtual", "said"),
    [
        ("1f2b", 2, 2, 1, "write 1f1b instead"),
        ("1f1b", 0, 2, 1, "stages: got 0"),
        ("1f1b", 2, 0, 1, "microbatches: got 0"),
        ("gpipe", 2, 2, 2, "1 for gpipe"),
        ("zb-v", 2, 4, 1, "2 for zb-v"),
        ("1f1b", 4, 6, 2, "write 8 instead"),
        ("1f1b", 4, 1, 2, "write 4 instead"),
    ],
)
def test_sizes_that_cannot_be(name: str, stages: int, microbatches: int, virtual: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        schedule(name, stages, microbatches, virtual)


def swapped(order: Schedule, rank: int, i: int, j: int) -> Schedule:
    actions = list(order[rank])
    actions[i], actions[j] = actions[j], actions[i]
    return (*order[:rank], tuple(actions), *order[rank + 1 :])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (swapped(schedule("1f1b", 2, 2), 1, 0, 1), "rank 1 at B1.0 for F1.0"),
        (swapped(schedule("zb-h1", 2, 2), 0, 2, 3), "rank 0 at W0.0 for I0.0"),
        ((schedule("1f1b", 2, 2)[0], schedule("1f1b", 2, 2)[1][:-1]), "B1.1 0 times"),
        ((*schedule("gpipe", 2, 1), (Action("F", 0, 0),)), "stage 0 on ranks 0 and 2"),
        ((schedule("gpipe", 1, 1)[0] * 2,), "2 times"),
        ((schedule("1f1b", 1, 1)[0] + schedule("zb-h1", 1, 1)[0][1:],), "B0.0"),
        (((Action("F", 1, 0), Action("B", 1, 0)),), "no action of stage 0"),
    ],
)
def test_broken_schedules_are_refused(broken: Schedule, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_schedule(broken)


def test_memory_is_checked() -> None:
    check_schedule(schedule("1f1b", 4, 8), most=[4, 3, 2, 1])
    with pytest.raises(PlanError, match="rank 0 holds 4 forwards"):
        check_schedule(schedule("1f1b", 4, 8), most=3)
    weighed = in_flight(schedule("1f1b", 4, 8), weight=lambda stage: 10.0 * (stage + 1))
    assert weighed == (40.0, 60.0, 60.0, 40.0)


@given(st.data())
def test_check_agrees_with_brute_force(data: st.DataObject) -> None:
    """Any order of 2 ranks and 2 microbatches: stuck exactly if no interleaving runs to the end."""
    ranks = []
    for rank in range(2):
        actions = [Action(kind, rank, m) for kind in ("F", "B") for m in range(2)]  # type: ignore[arg-type]
        ranks.append(tuple(data.draw(st.permutations(actions))))
    order = tuple(ranks)
    try:
        check_schedule(order)
        fine = True
    except PlanError:
        fine = False
    assert fine == any(runs(order, choice) for choice in interleavings())


def interleavings() -> list[tuple[int, ...]]:
    return [c for c in itertools.product((0, 1), repeat=8) if sum(c) == 4]


def runs(order: Schedule, choice: tuple[int, ...]) -> bool:
    done: set[tuple[str, int, int]] = set()
    place = [0, 0]
    for rank in choice:
        kind, stage, m = action = order[rank][place[rank]]
        place[rank] += 1
        if kind == "F" and stage == 1 and ("F", 0, m) not in done:
            return False
        if kind == "B" and ("F", stage, m) not in done:
            return False
        if kind == "B" and stage == 0 and ("B", 1, m) not in done:
            return False
        done.add(action)
    return True


@pytest.mark.parametrize(("name", "virtual"), CASES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_messages_match_in_order_on_every_channel(name: str, virtual: int, stages: int) -> None:
    """Followed one by one with blocking, ordered receives at the target, nobody is stuck."""
    order = schedule(name, stages, 3 * stages, virtual)
    entries = lowered(order)
    assert tuple(tuple(e for e in row if isinstance(e, Action)) for row in entries) == order
    sent = {(a, b): [e.message for e in entries[a] if isinstance(e, Send) and e.message.to_rank == b]
            for a in range(stages) for b in range(stages)}  # fmt: skip
    got = {(a, b): [e.message for e in entries[b] if isinstance(e, Receive) and e.message.from_rank == a]
           for a in range(stages) for b in range(stages)}  # fmt: skip
    assert sent == got
    for row in entries:
        posted = set()
        for entry in row:
            if isinstance(entry, Receive):
                posted.add(entry.message.target)
            elif isinstance(entry, Action):
                posted.discard(entry)
        assert not posted  # every receive stands before its target
    num = sum(map(len, sent.values()))
    away = sum(a != b for a, b in itertools.pairwise(homes(order)))
    assert num == 2 * away * 3 * stages


def test_message_time_delays_the_target() -> None:
    order = schedule("gpipe", 2, 1)
    times = timed(order, lambda action: 1.0, message_seconds=0.5)
    assert times.seconds == 5.0
    assert times.begin[Action("F", 1, 0)] == 1.5
