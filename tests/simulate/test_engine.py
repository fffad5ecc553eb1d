"""The engine against a second one that looks at everything at every event, and against known truths."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.errors import PlanError
from hyperparallel.simulate import Task, simulate
from hyperparallel.simulate.sharing import fair_rates

pytestmark = pytest.mark.pure


def ends(tasks: Sequence[Task], slowdown: float = 1.0) -> list[float]:
    return [span.end for span in simulate(tasks, slowdown).spans]


def test_a_stream_does_one_task_after_the_other() -> None:
    tasks = [Task("a", 0, "compute", 1.0), Task("b", 0, "compute", 2.0), Task("c", 1, "compute", 1.5)]
    assert ends(tasks) == [1.0, 3.0, 1.5]


def test_two_collectives_share_a_link() -> None:
    """One of 2 s and one of 1 s at full rate: halves until the short one ends at 2 s, then all."""
    link = {"nic": 1.0}
    tasks = [Task("a", 0, "comm.a", 2.0, demand=link), Task("b", 1, "comm.b", 1.0, demand=link)]
    assert ends(tasks) == [3.0, 2.0]


def test_what_shares_a_link_with_what_shares_a_link() -> None:
    """When a is done, b could go faster on x, but c holds it back on y: halves from begin to end."""
    tasks = [
        Task("a", 0, "comm", 1.0, demand={"x": 1.0}),
        Task("b", 1, "comm", 2.0, demand={"x": 1.0, "y": 1.0}),
        Task("c", 2, "comm", 3.0, demand={"y": 1.0}),
    ]
    assert ends(tasks) == [2.0, 4.0, 5.0]


def test_a_link_on_which_all_fit_slows_nobody() -> None:
    tasks = [Task(str(i), i, "comm", 1.0 + i, demand={"nic": 0.25}) for i in range(4)]
    assert ends(tasks) == [1.0, 2.0, 3.0, 4.0]


def test_communication_takes_units_from_computation() -> None:
    """A quarter held for the first 2 s: 1.5 s of work done by then, the last 0.5 s at full speed."""
    tasks = [Task("mm", 0, "compute", 2.0), Task("ar", 0, "comm", 2.0, kind="all_reduce", units=0.25)]
    assert ends(tasks) == [2.5, 2.0]
    assert ends(tasks, slowdown=1.5) == [3.0, 2.0]
    other_rank = [tasks[0], tasks[1]._replace(rank=1)]
    assert ends(other_rank, slowdown=1.5) == [2.0, 2.0]


def test_two_compute_streams_share_a_rank() -> None:
    tasks = [Task("a", 0, "compute", 1.0), Task("b", 0, "compute.2", 2.0)]
    assert ends(tasks) == [2.0, 3.0]


def test_a_wait_is_shown_from_when_its_stream_came_to_it() -> None:
    tasks = [
        Task("a", 0, "compute", 1.0),
        Task("ar", 0, "comm", 3.0),
        Task("ar wait", 0, "compute", 0.0, needs=[1], kind="wait"),
    ]
    wait = simulate(tasks).spans[2]
    assert (wait.begin, wait.end) == (1.0, 3.0)
    assert simulate(tasks).times[0].busy == 1.0


def test_memory_is_followed() -> None:
    tasks = [
        Task("f", 0, "compute", 1.0, alloc_bytes=100.0),
        Task("g", 0, "compute", 1.0, alloc_bytes=50.0, free_bytes=100.0),
        Task("h", 0, "compute", 1.0, alloc_bytes=70.0, free_bytes=120.0),
    ]
    timeline = simulate(tasks)
    assert [tuple(sample) for sample in timeline.memory[0]] == [
        (0.0, 100.0), (1.0, 150.0), (2.0, 50.0), (2.0, 120.0), (3.0, 0.0)
    ]  # fmt: skip
    assert timeline.peak_bytes(0) == timeline.peak_bytes() == 150.0


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task("t", 0, "compute", -1.0), "work of t"),
        (Task("t", 0, "compute", float("nan")), "work of t"),
        (Task("t", 0, "comm", 1.0, units=1.0), "units of t"),
        (Task("t", 0, "comm", 1.0, demand={"nic": 1.5}), "demand of t on nic"),
        (Task("t", 0, "comm", 1.0, needs=[3]), "needs of t"),
        (Task("t", 0, "comm", 1.0, needs=[0]), "needs of t"),
    ],
)
def test_impossible_tasks(task: Task, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        simulate([task])


def test_tasks_that_wait_for_each_other() -> None:
    tasks = [Task("a", 0, "compute", 1.0, needs=[1]), Task("b", 1, "compute", 1.0, needs=[0])]
    with pytest.raises(PlanError, match="a on rank 0, which waits for b"):
        simulate(tasks)
    with pytest.raises(PlanError, match="slowdown"):
        simulate([], slowdown=0.5)


shares = st.sampled_from([0.2, 0.5, 0.7, 1.0])
demands = st.dictionaries(st.sampled_from("abc"), shares, max_size=3)


@given(st.lists(demands, max_size=7))
def test_fair_rates_are_max_min(flows: list[dict[str, float]]) -> None:
    """Feasible, and each slowed flow has a full link on which nobody has more (Bertsekas, 6.5.2)."""
    rates = fair_rates(flows)
    load = {link: sum(f.get(link, 0.0) * r for f, r in zip(flows, rates, strict=True)) for link in "abc"}
    assert all(total <= 1.0 + 1e-9 for total in load.values())
    widths = [rate * max(flow.values(), default=0.0) for flow, rate in zip(flows, rates, strict=True)]
    for flow, rate, width in zip(flows, rates, widths, strict=True):
        assert 0.0 < rate <= 1.0
        if rate < 1.0 - 1e-9:
            assert any(
                load[link] > 1.0 - 1e-9
                and all(w <= width + 1e-9 for f, w in zip(flows, widths, strict=True) if link in f)
                for link in flow
            )


def slow_simulation(tasks: Sequence[Task], slowdown: float) -> list[tuple[float, float]]:
    """Begins and ends, everything worked out anew at each event."""
    now, left = 0.0, [task.work for task in tasks]
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    before = {}
    for i, task in enumerate(tasks):
        same = [j for j in range(i) if (tasks[j].rank, tasks[j].stream) == (task.rank, task.stream)]
        before[i] = [*task.needs, *same[-1:]]
    while len(end) < len(tasks):
        moved = True
        while moved:
            moved = False
            for i in range(len(tasks)):
                if i not in begin and all(j in end for j in before[i]):
                    begin[i], moved = now, True
                if i in begin and i not in end and left[i] <= 1e-12:
                    end[i], moved = now, True
        running = [i for i in begin if i not in end]
        if not running:
            break
        speeds = dict(zip(running, fair_rates([tasks[i].demand for i in running]), strict=True))
        for i in running:
            if tasks[i].stream.startswith("compute"):
                held = sum(tasks[j].units for j in running if tasks[j].rank == tasks[i].rank)
                many = sum(tasks[j].rank == tasks[i].rank and tasks[j].stream.startswith("compute")
                           for j in running)  # fmt: skip
                speeds[i] = max((1.0 - held) / slowdown if held else 1.0, 0.01) / many
        step = min(left[i] / speeds[i] for i in running)
        now += step
        for i in running:
            left[i] -= step * speeds[i]
    return [(begin[i], end[i]) for i in range(len(tasks))]


@st.composite
def task_lists(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for i in range(draw(st.integers(1, 14))):
        computes = draw(st.booleans())
        needs = draw(st.lists(st.integers(0, i - 1), max_size=2)) if i else []
        stream = draw(st.sampled_from(["compute", "compute.2"] if computes else ["comm.a", "comm.b"]))
        tasks.append(
            Task(
                f"t{i}",
                draw(st.integers(0, 2)),
                stream,
                draw(st.sampled_from([0.0, 0.5, 1.0, 1.7, 3.0])),
                needs,
                demand={} if computes else draw(demands),
                units=0.0 if computes else draw(st.sampled_from([0.0, 0.1, 0.6])),
            )
        )
    return tasks


@settings(max_examples=300, deadline=None)
@given(task_lists(), st.sampled_from([1.0, 1.25]))
def test_engine_equals_the_slow_one(tasks: list[Task], slowdown: float) -> None:
    timeline = simulate(tasks, slowdown)
    for span, (begin, end) in zip(timeline.spans, slow_simulation(tasks, slowdown), strict=True):
        assert (span.begin, span.end) == pytest.approx((begin, end), abs=1e-9)


def test_dense_contention_is_quick() -> None:
    """Eight ranks that share one link all the time; a large pipeline is in `test_pipeline.py`."""
    tasks: list[Task] = []
    for rank in range(8):
        for _ in range(500):
            demand = {"nic": 0.4, f"link {rank}": 1.0}
            tasks.append(Task("mm", rank, "compute", 1e-3))
            tasks.append(
                Task("ar", rank, "comm", 1e-3 * (1 + rank / 10), [len(tasks) - 1], "all_reduce", demand, 0.1)
            )
    began = time.process_time()
    simulate(tasks)
    assert time.process_time() - began < 3.0
