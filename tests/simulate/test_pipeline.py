"""Pipelines in the event engine: the papers' bubbles, messages, and the speed of a large step."""

from __future__ import annotations

import time

import pytest

from hyperparallel.mpmd import SCHEDULES, Action, Message, bubble_share, homes, schedule, timed
from hyperparallel.simulate import TaskPart, TaskParts, pipeline_tasks, simulate

pytestmark = pytest.mark.pure
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def instant(message: Message) -> TaskPart:
    return TaskPart("", 0.0, "comm.pp", "send")


CASES = [(name, v) for name, record in sorted(SCHEDULES.items()) for v in (1, 2, 3) if record.chunks(v)]


@pytest.mark.parametrize(("name", "virtual"), CASES)
@pytest.mark.parametrize(("stages", "groups"), [(1, 2), (2, 2), (4, 3), (8, 2)])
def test_closed_forms(name: str, virtual: int, stages: int, groups: int) -> None:
    """1F1B (p-1)/(m+p-1), interleaved (p-1)/(vm+p-1), others as in their records."""
    order = schedule(name, stages, stages * groups, virtual)
    chunks = len(homes(order)) // stages
    tasks = pipeline_tasks(order, lambda a: TaskParts([TaskPart("", SECONDS[a.kind] / chunks)]), instant)
    share = bubble_share(name, stages, stages * groups, virtual)
    assert simulate(tasks).bubble_share == pytest.approx(share, abs=1e-9)


def test_1f1b_and_interleaved_by_their_formulas() -> None:
    p, m, v = 4, 8, 2
    def price(a: Action) -> TaskParts:
        return TaskParts([TaskPart("", SECONDS[a.kind])])

    one = pipeline_tasks(schedule("1f1b", p, m), price, instant)
    assert simulate(one).bubble_share == pytest.approx((p - 1) / (m + p - 1))
    order = schedule("1f1b", p, m, v)
    two = pipeline_tasks(order, lambda a: TaskParts([TaskPart("", SECONDS[a.kind] / v)]), instant)
    assert simulate(two).bubble_share == pytest.approx((p - 1) / (m * v + p - 1))


@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_messages_take_time_as_in_the_recurrence(name: str, virtual: int) -> None:
    order = schedule(name, 4, 8, virtual)
    times = timed(order, lambda a: SECONDS[a.kind] + 0.01 * a.stage, message_seconds=0.25)

    def work(action: Action) -> TaskParts:
        return TaskParts([TaskPart("", SECONDS[action.kind] + 0.01 * action.stage)])

    tasks = pipeline_tasks(order, work, lambda m: TaskPart("", 0.25, f"comm.{m.source}", "send"))
    timeline = simulate(tasks)
    ends = {span.name: span.end for span in timeline.spans}
    for action, end in times.end.items():
        assert ends[str(action)] == pytest.approx(end)


def test_pieces_overlap_as_they_say() -> None:
    """A gradient's reduction stands beside the next computation and is done before the update."""

    def work(action: Action) -> TaskParts:
        if action.kind == "F":
            return TaskParts([TaskPart("mm", 1.0, alloc_bytes=8.0)])
        reduce = TaskPart("reduce", 3.0, "comm.dp", "reduce_scatter", after=(0,))
        norm = TaskPart("norm", 1.0, after=(0,), free_bytes=8.0)
        return TaskParts([TaskPart("mm", 1.0), reduce, norm], output=2)

    tasks = pipeline_tasks(schedule("1f1b", 1, 1), work, instant, lambda rank: [TaskPart("update", 1.0)])
    timeline = simulate(tasks)
    spans = {span.name: (span.begin, span.end) for span in timeline.spans}
    assert spans == {
        "F0.0 mm": (0.0, 1.0), "B0.0 mm": (1.0, 2.0), "B0.0 reduce": (2.0, 5.0),
        "B0.0 norm": (2.0, 3.0), "update": (5.0, 6.0),
    }  # fmt: skip
    assert timeline.masking_ratio == pytest.approx(1 / 3)
    assert timeline.exposed_seconds == pytest.approx(2.0)
    assert timeline.peak_bytes() == 8.0 and timeline.memory[0][-1].num_bytes == 0.0


def test_a_large_step_takes_under_a_second() -> None:
    """16 stages x 64 microbatches, four layers a stage with two reductions each, sends on shared links."""

    def work(action: Action) -> TaskParts:
        layer = [
            TaskPart("attention", 1e-3), TaskPart("reduce", 3e-4, "comm.tp", "all_reduce", units=0.1),
            TaskPart("mlp", 2e-3), TaskPart("reduce", 3e-4, "comm.tp", "all_reduce", units=0.1),
        ]  # fmt: skip
        return TaskParts(layer * 4)

    def message(one: Message) -> TaskPart:
        links = {f"nic {one.from_rank}": 0.7, f"nic {one.to_rank}": 0.7}
        return TaskPart("", 2e-4, "comm.pp", "send", demand=links)

    seconds = []
    for _ in range(3):  # a collection of what other tests left behind can fall into one of them
        began = time.process_time()
        timeline = simulate(pipeline_tasks(schedule("1f1b", 16, 64), work, message), slowdown=1.1)
        seconds.append(time.process_time() - began)
        assert len(timeline.spans) == 16 * 64 * 2 * 16 + 15 * 64 * 2
    assert min(seconds) < 1.0
