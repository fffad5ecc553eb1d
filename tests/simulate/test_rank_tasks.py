"""Programs as tasks and as measured spans: who waits for whom, and names in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperparallel.cluster import Rates
from hyperparallel.errors import PlanError
from hyperparallel.simulate import simulate
from hyperparallel.simulate.rank_tasks import Price, RatePrices, measured_spans, program_tasks
from hyperparallel.workload.instruction import Instruction

pytestmark = pytest.mark.pure
PROGRAM = [
    Instruction("mm", "matmul", flops=2.0, makes=(("x", 8.0),)),
    Instruction("all_reduce_start", "all_reduce", "start", (0,), num_bytes=6.0, axes=("tp",)),
    Instruction("gelu", "elementwise", needs=(0,), flops=1.0, last_reads=(("x", 8.0),)),
    Instruction("wait", "wait", "wait", (1,)),
    Instruction("add", "elementwise", needs=(2, 3), flops=1.0),
]
RATES = Rates(
    flops_per_second=1.0, memory_bytes_per_second=1.0, link_bytes_per_second=2.0, latency_seconds=0.5
)


def everybody(rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    return (0, 1)


def test_one_rank() -> None:
    timeline = simulate(program_tasks({0: PROGRAM}, RatePrices(RATES)))
    spans = {span.name: (span.stream, span.kind, span.begin, span.end) for span in timeline.spans}
    assert spans == {
        "mm": ("compute", "matmul", 0.0, 2.0),
        "all_reduce_start": ("compute", "start", 2.0, 2.0),
        "all_reduce": ("comm.tp", "all_reduce", 2.0, 5.5),
        "gelu": ("compute", "elementwise", 2.0, 3.0),
        "wait": ("compute", "wait", 3.0, 5.5),
        "add": ("compute", "elementwise", 5.5, 6.5),
    }
    assert timeline.exposed_seconds == 2.5 and timeline.masking_ratio == pytest.approx(1 / 3.5)
    assert timeline.peak_bytes() == 8.0


def test_a_collective_waits_for_its_members() -> None:
    slow = [Instruction("mm", "matmul", flops=5.0), *PROGRAM[1:]]
    timeline = simulate(program_tasks({0: PROGRAM, 1: slow}, RatePrices(RATES), everybody))
    begins = {span.rank: span.begin for span in timeline.spans if span.name == "all_reduce"}
    assert begins == {0: 5.0, 1: 5.0}
    alone = simulate(program_tasks({0: PROGRAM}, RatePrices(RATES), everybody))
    assert next(s.begin for s in alone.spans if s.name == "all_reduce") == 2.0  # others are there in time


def test_prices_take_links_and_units() -> None:
    class Half(RatePrices):
        def collective(self, one: Instruction, rank: int) -> Price:
            return Price(2.0, {"nic": 1.0}, units=0.5)

    timeline = simulate(program_tasks({0: PROGRAM, 1: PROGRAM}, Half(RATES), everybody))
    spans = {(s.rank, s.name): s.end - s.begin for s in timeline.spans}
    assert spans[0, "all_reduce"] == spans[1, "all_reduce"] == 4.0  # two ranks share the link
    assert spans[0, "gelu"] == 2.0


def test_other_collectives_on_another_rank() -> None:
    with pytest.raises(PlanError, match="rank 1 with other collectives"):
        program_tasks({0: PROGRAM, 1: PROGRAM[:1]}, RatePrices(RATES))


def test_launches_cost() -> None:
    prices = RatePrices(RATES, launch_seconds=0.25)
    assert prices.op(Instruction("view", "view")) == 0.25
    assert prices.op(PROGRAM[0]) == 2.25


def test_measured_spans_have_the_simulated_order() -> None:
    spans = measured_spans(3, PROGRAM, [0.0, 1.0, 1.1, 2.0, 2.5, 3.0], " #1")
    assert [(s.name, s.stream, s.kind, s.begin, s.end) for s in spans] == [
        ("mm #1", "compute", "matmul", 0.0, 1.0),
        ("all_reduce_start #1", "compute", "start", 1.0, 1.1),
        ("all_reduce #1", "comm.tp", "all_reduce", 1.0, 2.5),
        ("gelu #1", "compute", "elementwise", 1.1, 2.0),
        ("wait #1", "compute", "wait", 2.0, 2.5),
        ("add #1", "compute", "elementwise", 2.5, 3.0),
    ]


def test_a_stream_ends_its_collectives_in_order() -> None:
    """One that is waited for late was done when a later one of its stream was."""
    program = [
        Instruction("a_start", "all_reduce", "start", axes=("dp",)),
        Instruction("b_start", "all_reduce", "start", axes=("dp",)),
        Instruction("b_wait", "wait", "wait", (1,)),
        Instruction("mm", "matmul"),
        Instruction("a_wait", "wait", "wait", (0,)),
    ]
    spans = measured_spans(0, program, [0.0, 1.0, 2.0, 3.0, 8.0, 9.0])
    found = {s.name: (s.begin, s.end) for s in spans if s.stream == "comm.dp"}
    assert found == {"a": (0.0, 3.0), "b": (3.0, 3.0)}


def test_a_copy_moves_on_the_stream_that_it_names() -> None:
    """Beside a collective, which it does not wait for, and on one rank only."""
    copy = [
        Instruction(
            "fetch_start", "copy", "start", num_bytes=12.0, stream="copy.host.in", makes=(("w", 12.0),)
        ),
        *(replace(one, needs=tuple(need + 1 for need in one.needs)) for one in PROGRAM),
        Instruction("fetch_wait", "wait", "wait", (0,), last_reads=(("w", 12.0),)),
    ]
    prices = RatePrices(RATES, copy_bytes_per_second={"copy.host.in": 4.0})
    timeline = simulate(program_tasks({0: copy, 1: PROGRAM}, prices, everybody))
    spans = {(s.rank, s.name): (s.stream, s.begin, s.end) for s in timeline.spans}
    assert spans[0, "fetch"] == ("copy.host.in", 0.0, 3.0)
    assert spans[0, "all_reduce"] == spans[1, "all_reduce"] == ("comm.tp", 2.0, 5.5)
    assert timeline.peak_bytes(0) == 20.0
    with pytest.raises(PlanError, match=r"copy\.host\.in"):
        program_tasks({0: copy}, RatePrices(RATES))
